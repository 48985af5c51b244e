"""Which layers SGLang captures for a draft, and what it does with the ids that it is given.

Source: ``set_eagle3_layers_to_capture`` and ``set_dflash_layers_to_capture`` of SGLang's model classes, read
in 0.5.12.post1, 0.5.13, 0.5.14 and 0.5.23; tests/contract/test_sglang_layers.py runs the former.
"""

from eyas.layer_ids import ReadLayers, to_output_of

# DeepSeek-like classes. Up to 0.5.12 they capture at id + 1, as all others do. From 0.5.13 on they do so only
# where the first id is 1; other lists they take as they stand.
_AS_THEY_STAND = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
    }
)
# Others look before each layer only, and never behind the last one.
_CAPTURE_THE_LAST = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "GptOssForCausalLM"})
# Before, layers that are named ``layers.0`` were passed over and stayed random.
_OLDEST = "0.5.12"
_OLDEST_AS_THEY_STAND = "0.5.13"


def eagle3_ids(layers: ReadLayers) -> tuple[int, ...]:
    """Return the ids that make SGLang capture ``layers`` for an EAGLE-3 draft.

    Where no list of ids can, return some that no layer has: SGLang then has nothing to give to the draft, and
    cannot give it other layers instead. ``eagle3_layers_trouble`` says so.

    Raises: UserError for layer 0.
    """
    written = to_output_of(layers.ids)
    if not _stand(layers):
        return written
    if _is_shifted(layers):
        return tuple(layers.num_layers + i for i in layers.ids)
    return layers.ids


def oldest_for_eagle3(layers: ReadLayers) -> str:
    """Return the first version that captures these layers and loads every weight."""
    return _OLDEST_AS_THEY_STAND if _stand(layers) else _OLDEST


def layers_trouble(layers: ReadLayers) -> str | None:
    """Say why SGLang would not give a draft of any kind these layers, or None."""
    if layers.num_layers in layers.ids and layers.architecture not in _CAPTURE_THE_LAST:
        return f"SGLang does not capture the last layer, {layers.num_layers}, of {layers.architecture}"
    return None


def eagle3_layers_trouble(layers: ReadLayers) -> str | None:
    """Say why SGLang would not give an EAGLE-3 draft these layers, or None."""
    if _is_shifted(layers):
        return f"SGLang adds 1 to a list of layers of {layers.architecture} that begins with 1"
    return layers_trouble(layers)


def _stand(layers: ReadLayers) -> bool:
    """Whether SGLang must take the ids as they stand; a list that begins with 2 is written as one with 1."""
    return layers.architecture in _AS_THEY_STAND and layers.ids[0] != 2


def _is_shifted(layers: ReadLayers) -> bool:
    return layers.architecture in _AS_THEY_STAND and layers.ids[0] == 1
