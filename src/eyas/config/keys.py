"""Every setting by its dotted key; those of ``draft`` depend on its kind."""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eyas import registry
from eyas.config.schema import DraftSettings, RunConfig, draft_settings_of

Setting = tuple[str, FieldInfo]


def settings(architecture: str | None = None) -> list[Setting]:
    """Return (dotted key, field) of every setting of a run, for all kinds of draft or for one.

    Raises: UserError for a kind that nobody registered.
    """
    rows: dict[str, FieldInfo] = {}
    for name, info in RunConfig.model_fields.items():
        section = section_of(info)
        if section is None:
            rows[name] = info
            continue
        kinds = [section]
        if section is DraftSettings:
            names = sorted(registry.drafters()) if architecture is None else [architecture]
            kinds = [draft_settings_of(kind) for kind in names]
        for kind in kinds:
            for key, field in _leaves(kind, f"{name}."):
                rows.setdefault(key, field)
    return list(rows.items())


def known_keys(architecture: str | None = None) -> list[str]:
    """Return every dotted key, for all kinds of draft or for one."""
    return [key for key, _ in settings(architecture)]


def own_fields(kind: type[DraftSettings]) -> dict[str, FieldInfo]:
    """Return the settings that a kind of draft has beyond those of all kinds, or describes otherwise."""
    common = DraftSettings.model_fields
    return {
        name: info
        for name, info in kind.model_fields.items()
        if name not in common or (name != "architecture" and info.description != common[name].description)
    }


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None:
            yield prefix + name, info
        else:
            yield from _leaves(section, f"{prefix}{name}.")
