"""From the flags of ``eyas extract`` to settings; layer ids become ours here."""

import re
from collections.abc import Mapping
from typing import Any

from eyas.config.flags import EXTRACT_FLAGS
from eyas.config.schema import TargetSettings
from eyas.engines.info import engines_that
from eyas.errors import UserError
from eyas.layer_ids import check_aux_layer_ids, check_convention, parse_layer_ids
from eyas.progress import say
from eyas.targets.resolve_model import locate_config
from eyas.targets.spec import outline_config


def settings_from_flags(flags: Mapping[str, Any], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings that ``flags`` (None where not given) and further ``words`` stand for.

    Numbers among the words belong to ``--layer-ids``: ``--layer-ids 2 16 29`` is what people type.
    """
    numbers = [word for word in words if re.fullmatch(r"\d+(,\d+)*,?", word)]
    settings = [word for word in words if word not in numbers]
    given = {name: value for name, value in flags.items() if value is not None}
    if numbers and "layer_ids" not in given:
        raise UserError(f"cannot read {numbers[0]!r}", hint="layer ids follow --layer-ids")
    settings += [f"{f.key}={given[f.parameter]}" for f in EXTRACT_FLAGS if f.key and f.parameter in given]
    if "prepared_data" in given:
        settings += ["regenerate.enabled=false", "data.sources=[]"]
    if "endpoint" in given and not any(s.startswith("extract.engine=") for s in settings):
        able = engines_that(lambda info: info.captures_remotely)
        settings.append(f"extract.engine={able[0].name}")
    ids = _layer_ids(given, numbers)
    if ids is not None:
        settings.append(f"target.aux_layer_ids={list(ids)}")
    return tuple(settings)


def _layer_ids(given: Mapping[str, Any], numbers: list[str]) -> tuple[int, ...] | None:
    """Return the aux layer ids that are asked for, checked where the target is named too."""
    convention = given.get("layer_id_convention", "eyas")
    check_convention(convention)
    if "layer_ids" not in given:
        return None
    ids = parse_layer_ids(" ".join([given["layer_ids"], *numbers]), convention)
    if "model_path" not in given:
        return ids
    num_layers = _num_layers(given["model_path"])
    check_aux_layer_ids(ids, num_layers)
    if ids[-1] == num_layers and len(ids) > 1:
        say(f"extract: layer {num_layers} is the last: it is always stored, as the teacher's input")
        ids = ids[:-1]
    return ids


def _num_layers(model: str) -> int:
    folder, _ = locate_config(model)
    text = outline_config(folder, TargetSettings(model=model)).get_text_config()
    return int(text.num_hidden_layers)
