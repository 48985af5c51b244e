import pytest

from eyas import registry
from eyas.errors import UserError, did_you_mean


@pytest.mark.parametrize("table", [registry.ENGINES, registry.EXPORTERS, registry.TRACKERS])
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


def test_every_kind_of_draft_has_the_files_that_the_rest_of_eyas_asks_for() -> None:
    for name in registry.drafters():
        assert registry.drafter(name).name == name
        for file in ("settings", "drafter", "export", "load"):
            assert registry.has_drafter_file(name, file), file


def test_a_file_that_a_kind_lacks_is_named() -> None:
    with pytest.raises(UserError, match=r"drafts of kind eagle3 have no tensorrt\.py"):
        registry.drafter_file("eagle3", "tensorrt")
