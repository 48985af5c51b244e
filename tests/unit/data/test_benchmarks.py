"""Benchmarks are read by name or from files, evenly over their categories."""

from pathlib import Path

import pytest

from eyas.data.benchmarks import benchmark_fingerprint, read_benchmark
from eyas.errors import UserError
from tiny import write_jsonl

SHARED = [Path(__file__).parents[n] / "shared" / "data" / "eval-prompts.jsonl" for n in (3, 4)]


def test_a_file_gives_suites_and_categories_and_a_share_has_all_of_them(tmp_path: Path) -> None:
    rows = [
        {"suite": "s", "id": f"{c}{i}", "category": c, "turns": ["one", "two"]}
        for c in "abc"
        for i in range(4)
    ]
    prompts = read_benchmark(str(write_jsonl(tmp_path / "b.jsonl", rows)), 5, {})
    assert [p.category for p in prompts] == ["a", "b", "c", "a", "b"]
    assert {p.suite for p in prompts} == {"s"}
    assert [m.role for m in prompts[0].conversation.messages] == ["user", "assistant", "user"]


def test_rows_of_other_shapes_are_a_suite_of_their_own(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "hello"}, {"bad": 1}]))
    (prompt,) = read_benchmark(path, 5, {})
    assert (prompt.suite, prompt.category) == (path, "all")


def test_a_conversation_in_which_the_target_answers_nothing_is_no_prompt(tmp_path: Path) -> None:
    said = {"messages": [{"role": "assistant", "content": "Hello."}]}
    (prompt,) = read_benchmark(str(write_jsonl(tmp_path / "b.jsonl", [said, {"prompt": "hello"}])), 5, {})
    assert prompt.conversation.messages[0].content == "hello"


def test_another_file_under_the_same_name_is_another_benchmark(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "hello"}])
    before = benchmark_fingerprint(str(path))
    write_jsonl(path, [{"prompt": "goodbye"}])
    assert benchmark_fingerprint(str(path)) != before
    assert benchmark_fingerprint("MT_Bench") == "hf:HuggingFaceH4/mt_bench_prompts:train"


def test_the_long_suite_asks_about_installed_code_in_every_size() -> None:
    prompts = read_benchmark("long", 10_000, {})
    sizes = [6_000, 12_000, 24_000, 48_000, 96_000]
    categories = {f"{size // 1000}k characters": size for size in sizes}
    assert {p.category for p in prompts} == set(categories)
    assert {p.suite for p in prompts} == {"long"}
    said = [p.conversation.messages[0].content for p in prompts]
    assert len(set(said)) == len(said) == 18 * len(sizes)
    for prompt, content in zip(prompts, said, strict=True):
        size = categories[prompt.category]
        assert 0.95 * size < len(content) < size + 200
        assert "```python\n" in content
    # A share of the suite holds every size.
    assert {p.category for p in read_benchmark("long", 5, {})} == set(categories)


def test_the_long_suite_has_the_fingerprint_of_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.data import long_prompts

    before = benchmark_fingerprint("long")
    assert benchmark_fingerprint("long") == before
    monkeypatch.setattr(long_prompts, "_QUESTIONS", ("Why?",))
    assert benchmark_fingerprint("long") != before
    monkeypatch.setattr(long_prompts, "_MODULES", ("sys",))
    with pytest.raises(UserError, match="module sys, from which the benchmark long is made"):
        benchmark_fingerprint("long")


def test_an_unknown_name_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown benchmark 'mt-bensh'; did you mean 'mt-bench'"):
        read_benchmark("mt-bensh", 5, {})
    with pytest.raises(UserError, match="holds no prompt"):
        read_benchmark(str(write_jsonl(tmp_path / "b.jsonl", [{"bad": 1}])), 5, {})


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("mt-bench", {"prompt": ["Say a.", "Say b."], "category": "writing", "prompt_id": 1}, "Say a."),
        ("HumanEval", {"task_id": "t", "prompt": "def f():"}, "def f():"),
        ("gsm8k", {"question": "2 + 2?", "answer": "4"}, "2 + 2?"),
    ],
)
def test_known_names_read_their_hub_sets(
    monkeypatch: pytest.MonkeyPatch, name: str, row: dict[str, object], said: str
) -> None:
    from eyas.data import benchmarks
    from eyas.data.sources import Row

    monkeypatch.setattr(benchmarks, "read_source", lambda source: [Row(f"{source}:1", row)])
    (prompt,) = read_benchmark(name, 5, {})
    assert prompt.conversation.messages[0].content.endswith(said)
    assert prompt.conversation.messages[-1].role == "user"


@pytest.mark.skipif(not any(p.is_file() for p in SHARED), reason="the shared evaluation prompts are absent")
def test_the_evaluation_prompts_are_three_suites() -> None:
    path = next(p for p in SHARED if p.is_file())
    prompts = read_benchmark(str(path), 10_000, {})
    sizes = {s: sum(p.suite == s for p in prompts) for s in {p.suite for p in prompts}}
    assert sorted(sizes.values()) == [80, 164, 200]
