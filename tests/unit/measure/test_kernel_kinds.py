"""Kinds of kernels by their names, on names as profilers print them."""

from __future__ import annotations

import pytest

from vitgraph.measure.trace import ATTENTION, COPY, ELEMENTWISE, KINDS, NORM, OTHER, PRODUCT, kernel_kind

NAMES = {
    ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<96, 64, 64, 4, false, false, "
        "cutlass::bfloat16_t>, false, false, false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16gmem",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<(MaskMode)0>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*)",
        "varlen_forward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "vitgraph::varlen_attention",
    ],
    PRODUCT: [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
        "__5x_cublas",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT",
        "nvjet_tst_64x16_64x16_2x1_v_bz_splitK_TNT",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x2_tn_align8>",
        "cutlass_80_simt_sgemm_128x64_8x5_tn_align1",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, true>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>",
        "triton_tem_fused_addmm_gelu_3",
        "aten::addmm",
        "aten::mm",
        "aten::mkldnn_convolution",
        "aten::convolution",
    ],
    NORM: [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float, false>(long, float)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
        "_ZN2at6native53_GLOBAL__N__1aa0d23f_20_layer_norm_kernel_cu_9c5ada8a28vectorized_layer_norm_kernelIN3c10",
        "triton_red_fused_native_layer_norm_16",
        "triton_per_fused_add_native_layer_norm_2",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_red_fused__fused_rms_norm__to_copy_add_mul_select_unsqueeze_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)>",
        "aten::native_layer_norm",
        "aten::mean",
    ],
    ELEMENTWISE: [
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float"
        ", float, float, at::native::binary_internal::MulFunctor<float>>>(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>>>",
        "triton_poi_fused_gelu_2",
        "triton_poi_fused_mul_silu_2",
        "triton_poi_fused__to_copy_add_cat_mul_neg_slice_unsqueeze_4",
        "cpp_fused_add_gelu_0",
        "aten::mul",
        "aten::gelu",
        "aten::add_",
    ],
    COPY: [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::"
        "OpaqueType<2u>, unsigned int, 2, 128, 1>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<OpaqueType<4u>>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::bf16_copy_kernel_cuda>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, int, unsigned int, 2, 2, -2>",
        "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, int>(char*, char*, int*, int, long)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<"
        "c10::BFloat16, c10::BFloat16, 2, 1, 1>, Copy<c10::BFloat16, c10::BFloat16>>",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, int>",
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, (cudnnKernelDataType_t)0>",
        "triton_poi_fused_cat_1",
        "triton_poi_fused_clone_permute_view_3",
        "triton_poi_fused__to_copy_2",
        "aten::copy_",
        "aten::cat",
    ],
    OTHER: [
        "ncclDevKernel_AllGather_RING_LL",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "void cub::DeviceRadixSortOnesweepKernel",
        "spin_kernel",
        "",
    ],
}
PAIRS = [(kind, name) for kind, names in NAMES.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), PAIRS, ids=[name[:48] for _, name in PAIRS])
def test_a_name_tells_its_kind(kind: str, name: str) -> None:
    assert kernel_kind(name) == kind


def test_every_kind_occurs() -> None:
    assert set(NAMES) == set(KINDS)
