from xml.etree import ElementTree

from eyas.report.svg import line_chart


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    lines = [e.get("points") or "" for e in root.iter() if e.tag.endswith("polyline")]
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in line.split())] for line in lines]


def test_a_chart_is_well_formed_and_draws_each_series_once() -> None:
    svg = line_chart({"a <&> b": [(0, 1), (1, 2)], "c": [(0, 2), (1, 0)]}, "x & y", 'the "loss"')
    assert len(points_of(svg)) == 2
    assert "a &lt;&amp;&gt; b" in svg


def test_a_larger_value_is_drawn_higher_and_a_later_one_further_right() -> None:
    ((first, second, third),) = points_of(line_chart({"a": [(0, 1), (5, 3), (10, 2)]}, "step", "loss"))
    assert first[0] < second[0] < third[0]
    assert second[1] < third[1] < first[1]


def test_points_stay_inside_the_picture() -> None:
    series = {"a": [(i, (-1.0) ** i * i) for i in range(20)]}
    (line,) = points_of(line_chart(series, "x", "y"))
    assert all(0 <= x <= 640 and 0 <= y <= 260 for x, y in line)


def test_one_point_and_a_constant_need_no_range() -> None:
    assert len(points_of(line_chart({"a": [(3, 7)]}, "x", "y"))) == 1
    assert len(points_of(line_chart({"a": [(0, 7), (1, 7)]}, "x", "y"))) == 1


def test_nothing_to_draw_is_said() -> None:
    assert line_chart({"a": []}, "x", "y") == "<p>no data</p>"


def test_a_series_of_its_own_has_no_legend_and_an_empty_one_breaks_nothing() -> None:
    assert "training" not in line_chart({"training": [(0, 1), (1, 2)]}, "x", "y")
    ElementTree.fromstring(line_chart({"training": [(0, 1), (1, 2)], "held out": []}, "x", "y"))
