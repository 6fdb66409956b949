"""Files with which AutoProcessor of transformers reads text and images to the inputs of a LLaVA model of ours.

preprocessor_config.json   sizes and colours of images, as training reads them
processor_config.json      the token of an image, and how many of them one image has
chat_template.jinja        USER: ... ASSISTANT:, of a model that was trained on images of files
"""

from __future__ import annotations

import json
from typing import Any, Final

from megatrain.config.schema.vision import VisionConfig
from megatrain.data.images.conversations import written
from megatrain.data.images.pixels import tiling_of
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.interop.hf.tokenizer_files import CHAT_TEMPLATE, json_bytes

_ARCHITECTURE: Final = "LlavaForConditionalGeneration"
_BICUBIC: Final = 3
_TEXT: Final = "\0"


def processor_files(
    architecture: str, vision: VisionConfig, tokenizer: Tokenizer, *, is_trained: bool
) -> dict[str, bytes]:
    """Return names and contents of the files; none for another architecture, tiles, or an image token without text.

    Args:
        is_trained: the model was trained on images of files, whose conversations have our words.
    """
    if architecture != _ARCHITECTURE or vision.use_tiling or vision.image_token_id is None:
        return {}
    image = _text_of(tokenizer, vision.image_token_id)
    if image is None:
        return {}
    selects_all = not vision.disable_vision_class_token
    of_processor = {
        "processor_class": "LlavaProcessor",
        "image_token": image,
        "patch_size": vision.patch_dim,
        "num_additional_image_tokens": int(vision.vision_model_type != "siglip"),
        "vision_feature_select_strategy": "full" if selects_all else "default",
    }
    template = {CHAT_TEMPLATE: _template(image, tokenizer).encode()} if is_trained else {}
    return {
        "preprocessor_config.json": json_bytes(_of_images(vision)),
        "processor_config.json": json_bytes(of_processor),
        **template,
    }


def _of_images(vision: VisionConfig) -> dict[str, Any]:
    tiling = tiling_of(vision)
    size = {"height": vision.img_h, "width": vision.img_w}
    is_cropped = tiling.processor == "clip"
    of_size = {"size": {"shortest_edge": vision.img_h}, "crop_size": size, "do_center_crop": True}
    return {
        "image_processor_type": "CLIPImageProcessor" if is_cropped else "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": tiling.means,
        "image_std": tiling.deviations,
        "resample": _BICUBIC,
        **(of_size if is_cropped else {"size": size}),
    }


def _text_of(tokenizer: Tokenizer, number: int) -> str | None:
    """Return the text that the tokenizer reads as this token alone; None: there is none."""
    if number >= tokenizer.vocab_size:
        return None
    text = tokenizer.decode([number])
    return text if tokenizer.encode(text) == [number] else None


def _template(image: str, tokenizer: Tokenizer) -> str:
    """Return the Jinja template of the words around the turns of a conversation."""
    end = None if tokenizer.eod is None else _text_of(tokenizer, tokenizer.eod)
    turns = []
    for role in ("user", "assistant", "system"):
        before, after = written(role, _TEXT).split(_TEXT)
        after += (end or "") if role == "assistant" else ""
        turns.append(
            f"{{%- if message.role == '{role}' %}}{{{{ {json.dumps(before)} + text.value + {json.dumps(after)} }}}}{{%- endif %}}"
        )
    part = f"{json.dumps(image + chr(10))} if part.type == 'image' else part.text"
    return (
        "{%- for message in messages %}{%- set text = namespace(value='') %}"
        "{%- if message.content is string %}{%- set text.value = message.content %}{%- else %}"
        f"{{%- for part in message.content %}}{{%- set text.value = text.value + ({part}) %}}{{%- endfor %}}"
        f"{{%- endif %}}{''.join(turns)}{{%- endfor %}}"
    )
