import pytest

from eyas import registry
from eyas.errors import UserError, did_you_mean


@pytest.mark.parametrize("table", [registry.ENGINES, registry.DRAFTS, registry.EXPORTERS])
def test_every_registered_name_points_to_a_module_and_a_class(table: dict[str, str]) -> None:
    for target in table.values():
        module, colon, attribute = target.partition(":")
        assert module.startswith("eyas.")
        assert colon
        assert attribute.isidentifier()


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError) as caught:
        registry.resolve(registry.ENGINES, "transformer", "engine")
    assert caught.value.what == "unknown engine 'transformer'; did you mean 'transformers'?"
    assert "fake, sglang, transformers" in str(caught.value.hint)


def test_nothing_is_suggested_for_a_word_like_no_other() -> None:
    assert did_you_mean("zzzzzz", ["train", "export"]) == ""
    assert did_you_mean("trian", ["train", "export"]) == "; did you mean 'train'?"
