"""The model families, a line each: which architectures belong to one, its adapter, its presets.

Nothing here imports torch or a family file until an adapter is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

FAMILIES = "vitgraph.models.families"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the compatibility matrix.

    Attributes:
        name: Row name; also the name of its presets file.
        tower: The kind of tower; rows of one kind are shown together.
        models: The published models, for people.
        encoder: `module:class` of the adapter, the module among the families.
        architectures: Values of `architectures` in config.json that belong to the row.
        full_preset: Full-size preset that stands for the row in measurements.
        debug_preset: Small preset for tests and CPUs.
    """

    name: str
    tower: str
    models: str
    encoder: str
    architectures: tuple[str, ...]
    full_preset: str
    debug_preset: str

    def encoder_class(self) -> type[VisionEncoder]:
        """The adapter class; its module is imported here, torch is not."""
        module, class_name = self.encoder.split(":")
        return getattr(import_module(f"{FAMILIES}.{module}"), class_name)


QWEN3, QWEN2, GLM, INTERNVL = "Qwen3-VL", "Qwen2-VL", "GLM-V", "InternViT"
SIGLIP, MOONVIT, PIXTRAL, TWO_VIEWS, OTHER = "SigLIP", "MoonViT", "Pixtral", "two views", "own"
"""Kinds of towers."""

ROWS: tuple[ModelRow, ...] = (
    ModelRow(
        "qwen3_vl",
        QWEN3,
        "Qwen3-VL, Qwen3-VL-MoE, Cosmos 3, Intern-S1-Pro, ColQwen3",
        "qwen3_vl:Qwen3VLEncoder",
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Cosmos3ForConditionalGeneration",
            "Cosmos3OmniForConditionalGeneration",
            "InternS1ProForConditionalGeneration",
            "ColQwen3",
            "OpsColQwen3Model",
            "Qwen3VLNemotronEmbedModel",
        ),
        "qwen3-vl-30b-a3b",
        "qwen3-vl-debug",
    ),
    ModelRow(
        "qwen3_omni",
        QWEN3,
        "Qwen3-Omni",
        "qwen3_vl:Qwen3OmniEncoder",
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        "qwen3-omni-30b-a3b",
        "qwen3-omni-debug",
    ),
    ModelRow(
        "cohere_compass",
        QWEN3,
        "North Micro Vision (Cohere Compass)",
        "qwen3_vl:CohereCompassEncoder",
        ("CohereCompassForConditionalGeneration",),
        "north-micro-vision",
        "north-micro-vision-debug",
    ),
    ModelRow(
        "qwen3_5",
        QWEN3,
        "Qwen3.5, Qwen3.6, ColQwen3.5, Clef-Flash",
        "qwen3_5:Qwen3_5Encoder",
        ("Qwen3_5ForConditionalGeneration", "ColQwen3_5", "ClefFlashForJointSchema"),
        "qwen3.5-9b",
        "qwen3.5-debug",
    ),
    ModelRow(
        "qwen3_5_moe",
        QWEN3,
        "Qwen3.5-MoE, Qwen3.6-MoE, Qwen4-Exp, Intern-S2",
        "qwen3_5:Qwen3_5MoeEncoder",
        (
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen4ExpForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
        ),
        "qwen3.5-35b-a3b",
        "qwen3.5-moe-debug",
    ),
    ModelRow(
        "qwen2_vl",
        QWEN2,
        "Qwen2-VL, jina-reranker-m0",
        "qwen2_vl:Qwen2VLEncoder",
        ("Qwen2VLForConditionalGeneration", "JinaVLForRanking"),
        "qwen2-vl-7b",
        "qwen2-vl-debug",
    ),
    ModelRow(
        "qwen2_5_vl",
        QWEN2,
        "Qwen2.5-VL, OpenCUA",
        "qwen2_5_vl:Qwen2_5VLEncoder",
        ("Qwen2_5_VLForConditionalGeneration", "OpenCUAForConditionalGeneration"),
        "qwen2.5-vl-7b",
        "qwen2.5-vl-debug",
    ),
    ModelRow(
        "qwen2_5_omni",
        QWEN2,
        "Qwen2.5-Omni",
        "qwen2_5_vl:Qwen2_5OmniEncoder",
        (
            "Qwen2_5OmniModel",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5OmniThinkerForConditionalGeneration",
        ),
        "qwen2.5-omni-7b",
        "qwen2.5-omni-debug",
    ),
    ModelRow(
        "exaone4_5",
        QWEN2,
        "EXAONE-4.5",
        "qwen2_5_vl:Exaone45Encoder",
        ("Exaone4_5_ForConditionalGeneration",),
        "exaone-4.5-33b",
        "exaone-4.5-debug",
    ),
    ModelRow(
        "glm4v",
        GLM,
        "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-4.6V-Flash",
        "glm4v:Glm4vEncoder",
        (
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "Glm46VForConditionalGeneration",
        ),
        "glm-4.1v-9b",
        "glm-4v-debug",
    ),
    ModelRow(
        "glm_ocr",
        GLM,
        "GLM-OCR",
        "glm_ocr:GlmOcrEncoder",
        ("GlmOcrForConditionalGeneration",),
        "glm-ocr",
        "glm-ocr-debug",
    ),
    ModelRow(
        "glm5_next",
        GLM,
        "GLM-5.3-Flash",
        "glm_ocr:Glm5NextEncoder",
        ("Glm5NextForConditionalGeneration",),
        "glm-5.3-flash",
        "glm-5.3-debug",
    ),
    ModelRow(
        "internvl",
        INTERNVL,
        "InternVL 2, 2.5, 3, 3.5, Intern-S1, Qianfan-OCR",
        "internvl:InternVLEncoder",
        (
            "InternVLChatModel",
            "InternVLForConditionalGeneration",
            "InternS1ForConditionalGeneration",
            "QianfanOCRForConditionalGeneration",
        ),
        "internvl3.5-8b",
        "internvl-debug",
    ),
    ModelRow(
        "gemma3",
        SIGLIP,
        "Gemma 3",
        "gemma3:Gemma3Encoder",
        ("Gemma3ForConditionalGeneration",),
        "gemma-3-4b",
        "gemma3-debug",
    ),
    ModelRow(
        "idefics3",
        SIGLIP,
        "Idefics 3, SmolVLM, SmolVLM 2",
        "idefics3:Idefics3Encoder",
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        "smolvlm-500m",
        "idefics3-debug",
    ),
    ModelRow(
        "deepseek_vl2",
        SIGLIP,
        "DeepSeek-VL2",
        "deepseek_vl2:DeepseekVL2Encoder",
        ("DeepseekVLV2ForCausalLM", "deepseek_vl_v2"),
        "deepseek-vl2",
        "deepseek-vl2-debug",
    ),
    ModelRow(
        "llava_onevision",
        SIGLIP,
        "LLaVA-OneVision",
        "llava_onevision:LlavaOnevisionEncoder",
        ("LlavaOnevisionForConditionalGeneration",),
        "llava-onevision-7b",
        "llava-onevision-debug",
    ),
    ModelRow(
        "lfm2_vl",
        SIGLIP,
        "LFM2-VL",
        "lfm2_vl:Lfm2VLEncoder",
        ("Lfm2VlForConditionalGeneration", "Lfm2VLForConditionalGeneration"),
        "lfm2-vl-450m",
        "lfm2-vl-debug",
    ),
    ModelRow(
        "minicpmv_2_5",
        SIGLIP,
        "MiniCPM-V 2.5",
        "minicpmv:MiniCPMV25Encoder",
        ("MiniCPMV",),
        "minicpm-v-2.5",
        "minicpm-v-2.5-debug",
    ),
    ModelRow(
        "minicpmv_2_6_4_0",
        SIGLIP,
        "MiniCPM-V 2.6, MiniCPM-V 4.0, MiniCPM-o 2.6",
        "minicpmv:MiniCPMVEncoder",
        ("MiniCPMV", "MiniCPMO"),
        "minicpm-v-2.6",
        "minicpm-v-2.6-debug",
    ),
    ModelRow(
        "minicpmv_4_5",
        SIGLIP,
        "MiniCPM-V 4.5, MiniCPM-o 4.5 (images)",
        "minicpmv:MiniCPMV45Encoder",
        ("MiniCPMV", "MiniCPMO"),
        "minicpm-v-4.5",
        "minicpm-v-4.5-debug",
    ),
    ModelRow(
        "kimi_vl",
        MOONVIT,
        "Kimi-VL",
        "kimi_vl:KimiVLEncoder",
        ("KimiVLForConditionalGeneration",),
        "kimi-vl-a3b",
        "kimi-vl-debug",
    ),
    ModelRow(
        "kimi_k25",
        MOONVIT,
        "Kimi-K2.5, Kimi-K2.6 (images)",
        "kimi_k25:KimiK25Encoder",
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "kimi-k2.5",
        "kimi-k2.5-debug",
    ),
    ModelRow(
        "kimi_k3",
        MOONVIT,
        "Kimi-K3",
        "kimi_k25:KimiK3Encoder",
        ("KimiK3ForConditionalGeneration",),
        "kimi-k3",
        "kimi-k3-debug",
    ),
    ModelRow(
        "pixtral",
        PIXTRAL,
        "Mistral Small 3.1, 3.2, Ministral 3, Pixtral-12B, Pixtral Large, LightOnOCR",
        "pixtral:PixtralEncoder",
        (
            "Mistral3ForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "LightOnOCRForConditionalGeneration",
            "LightOnOcrForConditionalGeneration",
        ),
        "mistral-small-3.1-24b",
        "pixtral-debug",
    ),
    ModelRow(
        "deepseek_ocr",
        TWO_VIEWS,
        "DeepSeek-OCR, Unlimited-OCR",
        "deepseek_ocr:DeepseekOCREncoder",
        ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM", "UnlimitedOcrForConditionalGeneration"),
        "deepseek-ocr",
        "deepseek-ocr-debug",
    ),
    ModelRow(
        "step3_vl",
        TWO_VIEWS,
        "Step3-VL-10B, Step-3.7, Step-5, Step3",
        "step3_vl:Step3VLEncoder",
        (
            "StepVLForConditionalGeneration",
            "Step3p7ForConditionalGeneration",
            "Step5ForConditionalGeneration",
            "Step3VLForConditionalGeneration",
        ),
        "step3-vl-10b",
        "step3-vl-debug",
    ),
    ModelRow(
        "ovis2",
        OTHER,
        "Ovis2",
        "ovis2:Ovis2Encoder",
        ("Ovis2ForConditionalGeneration",),
        "ovis2-1b",
        "ovis2-debug",
    ),
    ModelRow(
        "molmo2",
        OTHER,
        "Molmo 2 (images)",
        "molmo2:Molmo2Encoder",
        ("Molmo2ForConditionalGeneration",),
        "molmo2-8b",
        "molmo2-debug",
    ),
    ModelRow(
        "ernie4_5_vl",
        OTHER,
        "ERNIE-4.5-VL",
        "ernie4_5_vl:Ernie45VLEncoder",
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
        "ernie-4.5-vl-28b-a3b",
        "ernie4.5-vl-debug",
    ),
    ModelRow(
        "deepseek_v41",
        OTHER,
        "DeepSeek-V4.1-Flash",
        "deepseek_v41:DeepseekV41Encoder",
        ("DeepseekV41ForCausalLM",),
        "deepseek-v4.1-flash",
        "deepseek-v4.1-debug",
    ),
    ModelRow(
        "llama4",
        OTHER,
        "Llama 4",
        "llama4:Llama4Encoder",
        ("Llama4ForConditionalGeneration",),
        "llama-4-scout",
        "llama4-debug",
    ),
    ModelRow(
        "minimax_m3",
        OTHER,
        "MiniMax-M3 (images)",
        "minimax_m3:MiniMaxM3Encoder",
        ("MiniMaxM3SparseForConditionalGeneration",),
        "minimax-m3",
        "minimax-m3-debug",
    ),
    ModelRow(
        "gemma4",
        OTHER,
        "Gemma 4",
        "gemma4:Gemma4Encoder",
        ("Gemma4ForConditionalGeneration",),
        "gemma-4-26b-a4b",
        "gemma-4-debug",
    ),
)

IMAGES_ONLY = frozenset(
    {
        "CohereCompassForConditionalGeneration",
        "JinaVLForRanking",
        "OpenCUAForConditionalGeneration",
        "QianfanOCRForConditionalGeneration",
    }
)
"""Names that take images alone, of families that take videos too."""

NOT_YET: Mapping[str, str] = {
    "Alpamayo2Super": "Qwen3-VL's tower, but its config.json sets the images' pixel range",
    "H2OVLChatModel": "InternVL's tower, but its images are tiled at two scales",
    "NVLM_D": "InternViT-6B with heads that are padding, and a projector of its own",
    "Cosmos3EdgeForConditionalGeneration": "a SigLIP 2 tower with a merger of its own",
    "MiniCPMV4_6ForConditionalGeneration": "its tower merges windows half way, and has no resampler",
    "MiniCPMV4_7ForConditionalGeneration": "its tower merges windows half way, and has no resampler",
    "DeepseekOCR2ForCausalLM": "a language model encodes its images after SAM",
    "LlavaOnevision1_5_ForConditionalGeneration": "a tower with a class token in each image, which transformers lacks",
    "LLaVAOneVision1_5_ForConditionalGeneration": "a tower with a class token in each image, which transformers lacks",
    "LlavaOnevision2ForConditionalGeneration": "a tower of its own, which transformers lacks",
    "MolmoForCausalLM": "the first Molmo: CLIP on padded crops, which transformers lacks",
    "Ovis": "published with code of its own; give a checkpoint in transformers' format (Ovis2-1B-hf)",
    "Ovis2_5": "SigLIP 2 with windows and rotary positions, which transformers lacks",
    "PixtralForConditionalGeneration": "files in Mistral's own format; give the checkpoint in transformers' format",
    "Gemma4UnifiedForConditionalGeneration": "it has no tower: patches are projected, and nothing attends",
}
"""Names whose relatives have an adapter, and what is different in them."""
