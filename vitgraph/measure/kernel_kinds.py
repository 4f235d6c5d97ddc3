"""Says what a GPU kernel or a CPU operator does, by its name: attention, products, norms, element-wise, copies.

The rules are tried in order and the first that matches decides, because names nest: an attention kernel of CUTLASS
also says `cutlass`, a copy of torch runs in an `elementwise_kernel`. A compiled kernel (`triton_poi_fused_…`) is named
after the operators that were fused into it, and is what the heaviest of them is. What no rule knows is `other`, and a
report lists it by name.
"""

from __future__ import annotations

import re

ATTENTION, PRODUCT, NORM, ELEMENTWISE, COPY, OTHER = "attention", "product", "norm", "element-wise", "copy", "other"
KINDS = (ATTENTION, PRODUCT, NORM, ELEMENTWISE, COPY, OTHER)

_RULES = {
    ATTENTION: (
        r"flash|fmha|sdpa|attention|attn"  # FlashAttention 2 to 4, memory-efficient, cuDNN's, torch's operators
        r"|prefillwith|mergestates"  # FlashInfer
        r"|softmax"  # the parts of attention that is not fused
        r"|varlen_forward"  # this project's Triton kernel
    ),
    PRODUCT: (
        r"gemm|gemv|nvjet|cutlass|xmma|splitkreduce|wgrad|cublas"  # cuBLAS, cuBLASLt, CUTLASS
        r"|convolve|convolution|conv[123]d|implicit_|winograd"  # convolutions are products too
        r"|triton_tem_"  # matrix templates of the compiler
        r"|^aten::(_?addmm|mm|bmm|baddbmm|matmul|linear|dot|mv|_addmm_activation)$|mkldnn_linear|mkl_linear|mkldnn_(conv|rnn)"
    ),
    NORM: (
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|rowwisemoments|welford"
        r"|meanops|rsqrt|^aten::(mean|var_mean)$"  # of a norm spelled out; its products count as element-wise
    ),
    COPY: (
        r"^memcpy|^memset|memcpy32|copy_kernel|copyfunctor|_copy_kernel|fillfunctor|fill_kernel"
        r"|catarraybatchedcopy|cat_kernel|(?<!all)(?<!all_)gather|(?<!reduce)(?<!reduce_)scatter|index_?select|index_elementwise|index_put|embedding"
        r"|nchwtonhwc|nhwctonchw|transpose|permute|tensortransform"
        r"|^aten::(copy_|_to_copy|clone|cat|contiguous|fill_|zero_|index|index_select|embedding|_foreach_copy_|stack"
        r"|gather|repeat|constant_pad_nd|split_with_sizes_copy)$"
    ),
    ELEMENTWISE: (
        r"elementwise|gelu|silu|relu|sigmoid|rotary|rope|reduce_kernel|reduction_kernel|pointwise|multi_tensor_apply"
        r"|softplus|tanh|act_and_mul"
        r"|^aten::(add|sub|mul|div|neg|cos|sin|pow|sqrt|exp|abs|sum|var|max|min|maximum|minimum|clamp"
        r"|where|erf|reciprocal|lt|le|gt|ge|eq|ne|addcmul|lerp|masked_fill|quick_gelu)_?$"
    ),
}
_PATTERNS = {kind: re.compile(rule, re.IGNORECASE) for kind, rule in _RULES.items()}

_FUSED = re.compile(r"^(?:triton_(?:poi|red|per|spl)|cpp)_fused_(?P<operators>.*?)(?:_\d+)?$")
_FUSED_NORM = re.compile(r"native_layer_norm|rms_norm|(?:mean|var_mean|sum).*rsqrt|rsqrt.*(?:mean|var_mean|sum)")
_FUSED_COPY = re.compile(
    r"(?<![a-z])("
    r"_unsafe_view|_to_copy|as_strided|constant_pad_nd|convert_element_type|index_select|split_with_sizes"
    r"|slice_scatter|select_scatter|unsqueeze|transpose|permute|reshape|embedding|squeeze|unbind|expand"
    r"|select|clone|stack|slice|split|index|zeros|copy|full|view|cat"
    r")(?![a-z])"
)
"""Operators that move data and compute nothing; longer names first, since some contain others."""


def kernel_kind(name: str) -> str:
    """What a kernel or an operator does.

    Returns:
        One of `KINDS`.
    """
    fused = _FUSED.match(name)
    if fused is not None:
        return _fused_kind(fused["operators"])
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


def _fused_kind(operators: str) -> str:
    """Kind of a compiled kernel from the names of its operators, which are joined by underscores."""
    if _FUSED_NORM.search(operators):
        return NORM
    if re.search(r"softmax|flex_attention", operators):
        return ATTENTION
    return ELEMENTWISE if _FUSED_COPY.sub("", operators).strip("_") else COPY
