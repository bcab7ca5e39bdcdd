"""Are intervals, sums, overlaps and charts what their formulas say?"""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from ripresa.cluster.evaluation.bootstrap import FEWEST, Estimate, median, ratio
from ripresa.cluster.evaluation.cases import Answer
from ripresa.cluster.evaluation.crossing import crossings
from ripresa.cluster.evaluation.experiments import Cost, Experiment, Result
from ripresa.cluster.evaluation.laboratory import Foretelling
from ripresa.cluster.evaluation.measures import (
    SUPERVISED,
    Group,
    Match,
    bucket_names,
    differences_of,
    groups,
    matches,
)
from ripresa.cluster.evaluation.plots import Line, line_chart
from ripresa.cluster.evaluation.report import About, page
from ripresa.cluster.evaluation.selections import Selections, overlap
from ripresa.cluster.evaluation.summary import ALL, Summary, summarise
from ripresa.cluster.evaluation.tails import MATTERS, chosen, tail_rows
from ripresa.workers.replay import TailVariant

WINDOW = 8


def test_the_interval_of_many_groups_is_that_of_the_normal_distribution() -> None:
    draws = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = ratio(list(draws), [1.0] * 400, seed=7)
    error = 1.96 * draws.std() / math.sqrt(400)
    assert found.mean == pytest.approx(draws.mean())
    assert found.low == pytest.approx(draws.mean() - error, abs=error / 10)
    assert found.high == pytest.approx(draws.mean() + error, abs=error / 10)
    assert ratio(list(draws), [1.0] * 400, seed=7) == found
    assert ratio(list(draws), [1.0] * 400, seed=8) != found


def test_groups_count_by_their_items_and_are_drawn_whole() -> None:
    found = ratio([500.0] + 4 * [0.0], [100.0] + 4 * [100.0], seed=0)
    assert (found.mean, found.low, found.high) == (1.0, 0.0, 3.0)
    heavy = ratio([900.0] + 4 * [0.0], [900.0] + 4 * [25.0], seed=0)
    assert (heavy.mean, heavy.low) == (0.9, 0.0)


def test_few_conversations_have_no_interval() -> None:
    assert ratio([6.0], [3.0], seed=0) == Estimate(2.0, None, None)
    assert ratio((FEWEST - 1) * [6.0], (FEWEST - 1) * [3.0], seed=0) == Estimate(2.0)
    assert ratio(FEWEST * [6.0], FEWEST * [3.0], seed=0) == Estimate(2.0, 2.0, 2.0)
    for totals, counts in (([], []), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="conversation"):
            ratio(totals, counts, seed=0)


def test_overlap_is_the_share_of_the_references_entries() -> None:
    reference = torch.tensor([[4, 1, 7], [0, -1, -1], [5, 6, -1], [-1, -1, -1]])
    other = torch.tensor([[7, 4, 2], [3, 0, 1], [4, 7, -1], [9, 8, 2]])
    assert overlap(reference, other).tolist() == [pytest.approx(2 / 3), 1.0, 0.0, 1.0]
    assert overlap(reference, reference).tolist() == [1.0] * 4
    # An entry of a neighbouring row is none of one's own.
    assert overlap(torch.tensor([[3], [0]]), torch.tensor([[0], [3]])).tolist() == [0.0, 0.0]


def test_selections_are_found_by_position_whatever_the_chunks() -> None:
    seen = Selections()
    for first, stop in ((0, 3), (3, 4), (2, 4)):
        seen("positions", 1, torch.arange(first, stop))
        # The last step computes two rows once more, with other entries.
        again = 100 if (first, stop) == (2, 4) else 0
        seen("selected", 1, torch.arange(first, stop)[:, None] + again)
        seen("hidden", 1, torch.zeros(1))
    assert seen.of(1, 4)[1].tolist() == [[1], [2], [3]]
    assert seen.of(3, 5) == {}
    seen.forget()
    assert seen.of(1, 4) == {}


def foretelling(start: int, logits: torch.Tensor) -> Foretelling:
    entries = torch.arange(len(logits))[:, None]
    return Foretelling(start, logits, {2: entries})


def test_tokens_are_summed_by_kind_and_distance() -> None:
    generator = torch.Generator().manual_seed(3)
    size = 8 * WINDOW + 5
    expected = foretelling(10, torch.randn(size, 5, generator=generator))
    told = foretelling(10, expected.logits + 0.1 * torch.randn(size, 5, generator=generator))
    tokens = torch.randint(5, (10 + size,), generator=generator).tolist()
    differences = differences_of(expected, told, tokens)
    supervised = frozenset({10, 11, 30})
    found = list(groups("a", expected, told, differences, 10, WINDOW, supervised))
    by_place = {(g.kind, g.bucket): g for g in found}
    assert {bucket for _, bucket in by_place} == set(bucket_names(WINDOW))
    assert sum(g.num_tokens for g in found) == 8 * WINDOW, "what is further away does not count"
    assert by_place["supervised", "[0,1)"].num_tokens == 1
    assert by_place["supervised", "[1,4)"].num_tokens == 1
    assert by_place["context", "[1,4)"].num_tokens == 2
    first = by_place["supervised", "[0,1)"].sums
    assert first["kl"] == pytest.approx(float(differences.kl[0]))
    assert first["difference"] == pytest.approx(first["nll"] - first["reference nll"])
    assert first["overlap of layer 2"] == 1.0
    between = by_place["context", f"[{2 * WINDOW},{4 * WINDOW})"]
    rows = [d for d in range(2 * WINDOW, 4 * WINDOW) if d + 10 != 30]
    assert between.num_tokens == len(rows)
    assert between.sums["kl"] == pytest.approx(float(differences.kl[rows].sum()))


def test_a_message_matches_if_all_its_tokens_are_likeliest() -> None:
    tokens = [0, 1, 2, 3, 1, 2]
    logits = torch.eye(4)[[1, 2, 3, 0, 2]]  # foretells tokens 1 to 5, the fourth wrongly
    told = foretelling(1, logits)
    differences = differences_of(told, told, tokens)
    answers = [Answer("A", 1, 3), Answer("B", 3, 5), Answer("C", 0, 2), Answer("D", 5, 7)]
    found = list(matches("a", differences, 1, answers, "after b"))
    assert found == [Match("a", "A", "after b", True), Match("a", "B", "after b", False)]


def sums(value: float, count: int) -> dict[str, float]:
    return {"nll": value * count, "kl": value * count}


def test_a_summary_adds_up_conversations() -> None:
    results = [
        Result(
            Experiment.ANSWER,
            number,
            (
                Group("x", "context", "[0,1)", 2, sums(value, 2)),
                Group("x", "context", "[1,4)", 3, sums(value, 3)),
            ),
            (Match("x", "T1", None, value > 1), Match("x", "T2", "across b", True)),
            (Cost("x", "bounded", 60, 8, 10 * number, 4, float(number)),),
            hit=8 * (number % 2),
            worst_exact=value / 10,
            exact_start=number,
        )
        for number, value in enumerate((1.0, 2.0, 3.0, 2.0, 2.0))
    ]
    found = summarise(results, seed=1)
    by_bucket = {row.bucket: row for row in found.tokens}
    assert by_bucket[ALL].num_tokens == 25
    assert by_bucket["[0,1)"].num_conversations == 5
    kl = by_bucket[ALL].measures["kl"]
    assert kl.low is not None
    assert kl.high is not None
    assert kl.mean == pytest.approx(2.0)
    assert 1.0 <= kl.low < 2.0 < kl.high
    exact = {(row.task, row.placement): row.exact.mean for row in found.matches}
    assert exact["T1", None] == pytest.approx(4 / 5)
    assert exact["T2", "across b"] == 1.0
    assert exact[ALL, None] == pytest.approx(9 / 10)
    (cost,) = found.costs
    assert cost.num_tokens is None
    assert (cost.encoder_row_layers, cost.seconds) == (20.0, Estimate(2.0, 1.0, 3.0))
    (check,) = found.checks
    assert (check.num_cases, check.num_able, check.worst) == (5, 4, 0.3)
    assert [(row.num_tokens, row.num_cases) for row in found.hits] == [(0, 3), (8, 2)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_conversation_hides_one_whose_logits_are_no_numbers(place: int) -> None:
    worst = [0.0, 0.0, 0.0]
    worst[place] = math.nan
    results = [
        Result(Experiment.HIT, number, worst_exact=value, exact_start=1)
        for number, value in enumerate(worst)
    ]
    (check,) = summarise(results, seed=0).checks
    assert math.isnan(check.worst)


def tail_sums(kl: float) -> dict[str, float]:
    return {**sums(kl, 10), "reference nll": 0.0, "difference": 10 * kl, "same top": 10.0}


def tail_results(floored: float, whole: float) -> list[Result]:
    """Conversations of very different KL, whose tails differ by the same in all of them."""
    return [
        Result(
            Experiment.ANSWER,
            number,
            (
                Group("both 8", SUPERVISED, "[0,1)", 10, tail_sums(number + floored)),
                Group("both 8 layer_exact", SUPERVISED, "[0,1)", 10, tail_sums(number + whole)),
            ),
            costs=(
                Cost("both 8", "bounded", 60, 8, 100, 40, 2.0),
                Cost("both 8 layer_exact", "bounded", 60, 8, 130, 40, 3.0),
            ),
        )
        for number in range(FEWEST)
    ]


def test_tails_are_compared_in_pairs_and_the_cheaper_is_kept_unless_it_matters() -> None:
    for floored, whole, tail in (
        (2 * MATTERS, 0.0, TailVariant.LAYER_EXACT),
        (MATTERS / 2, 0.0, TailVariant.FLOORED),
        (0.0, 2 * MATTERS, TailVariant.FLOORED),
    ):
        (row,) = summarise(tail_results(floored, whole), seed=0).tails
        assert row.floored.low is not None
        assert row.floored.high is not None
        assert row.floored.high - row.floored.low > 1, "apart, they are no evidence"
        for end in (row.kl.low, row.kl.mean, row.kl.high, row.nll.mean):
            assert end == pytest.approx(floored - whole)
        assert (row.encoder_row_layers, row.decoder_row_layers) == ((100, 30), (40, 0))
        assert row.seconds == 1.5
        assert chosen([row], "both 8") is tail
        assert chosen([row], "both 16") is None
        text = page(summarise(tail_results(floored, whole), seed=0), About("x", {}, 8, 32), {})
        assert f"**Choice.** `{tail}`" in text
        assert ("That is what" in text) == (tail is TailVariant.FLOORED)
    few = list(tail_rows(tail_results(1.0, 0.0)[:-1], seed=0))
    assert chosen(few, "both 8") is None


def test_a_median_has_the_interval_of_its_ranks() -> None:
    values = [5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 600.0]
    assert median(values) == Estimate(5.0, 2.0, 9.0), "one slow run is outside"
    assert median(values[:6]) == Estimate(4.0, 1.0, 9.0)
    assert median(values[:5]) == Estimate(5.0)
    draws = np.random.default_rng(1).exponential(size=(2000, 25))
    found = [median(list(each)) for each in draws]
    covered = [e.low is not None and e.high is not None and e.low <= LN2 <= e.high for e in found]
    assert 0.95 <= np.mean(covered) <= 0.97, "24 runs on either side: 0.957"
    with pytest.raises(ValueError, match="value"):
        median([])


def grown(of: dict[int, tuple[int, list[float]]]) -> Summary:
    """Prompts of growing length: rows and seconds of `exact`; of `bounded`, 40 and 5."""
    costs = [
        Cost(arm, "bounded", length, 0, rows, 0, second)
        for length, exact in of.items()
        for arm, (rows, seconds) in {"bounded": (40, RUNS * [5.0]), "exact": exact}.items()
        for second in seconds
    ]
    return summarise([Result(Experiment.GROWTH, 0, costs=tuple(costs))], seed=0)


RUNS = 9
LN2 = math.log(2)
FAST, SLOW, BOTH = RUNS * [1.0], RUNS * [9.0], [1.0, 1.0, 1.0, *6 * [9.0]]


@pytest.mark.parametrize(
    ("seconds", "start", "dearer", "undecided", "said"),
    [
        ([FAST, SLOW, SLOW], 30, 20, (), "cross between 20 and 30 tokens; from 30 tokens on"),
        ([FAST, BOTH, SLOW], 40, 20, (30,), "between 20 and 40 tokens, not decided at 30 tokens;"),
        ([BOTH, SLOW, SLOW], 30, None, (20,), "from 30 tokens on `bounded` is the cheaper at ever"),
        ([SLOW, FAST, SLOW], 40, 30, (), "cross between 30 and 40 tokens"),
        ([SLOW, SLOW, SLOW], 20, None, (), "do not cross in the measured range"),
        ([SLOW, SLOW, FAST], None, 40, (), "not the cheaper at the longest"),
        ([FAST, SLOW, BOTH], None, 20, (40,), "cheaper at 20 tokens, and not decided at 40 tokens"),
        ([SLOW, SLOW, BOTH], None, None, (40,), "nowhere the dearer, and not decided at 40 tokens"),
        ([BOTH, BOTH, BOTH], None, None, (20, 30, 40), "not decided at any measured length"),
        (3 * [3 * [9.0]], None, None, (20, 30, 40), "not decided at any measured length"),
    ],
)
def test_where_exact_and_bounded_cross_is_said_as_far_as_intervals_are_apart(
    seconds: list[list[float]],
    start: int | None,
    dearer: int | None,
    undecided: tuple[int, ...],
    said: str,
) -> None:
    summary = grown({20 + 10 * i: (40 + 10 * i, each) for i, each in enumerate(seconds)})
    rows, found = crossings(summary.costs)
    assert (found.unit, found.lengths) == ("seconds", (20, 30, 40))
    assert (found.start, found.dearer, found.undecided) == (start, dearer, undecided)
    text = page(summary, About("x", {}, 8, 32), {})
    assert text.count(said) >= 2, "in brief, and beside the table"
    # Of rows there is no doubt, and as many are not fewer.
    assert (rows.other, rows.unit, rows.ratios) == ("exact", "row-layers", (1, 2 / 3))
    assert (rows.start, rows.dearer, rows.undecided) == (30, 20, ())
    longer = [cost for cost in summary.costs if cost.num_tokens != 20]
    assert next(crossings(longer)).start == 30
    assert list(crossings([])) == []


def test_few_messages_are_counted_and_many_have_a_share() -> None:
    results = [
        Result(
            Experiment.HIT,
            number,
            (Group("x", "context", "[0,1)", 2, tail_sums(1.0)),),
            (Match("x", "T10", "before b" if number else "across b", number > 1),),
        )
        for number in range(FEWEST + 1)
    ]
    text = page(summarise(results, seed=0), About("x", {}, 8, 32), {})
    assert "| across b | 1 | 1 | 0 of 1 |" in text
    assert f"| before b | {FEWEST} | {FEWEST} | 0.80 (" in text
    assert f"fewer than {FEWEST} conversations" in text


@pytest.mark.parametrize("lowest", [None, 1e-6])
def test_charts_are_xml_and_stay_inside(lowest: float | None) -> None:
    lines = [
        Line("a < b & c", [Estimate(0.2, 0.1, 0.31), None, Estimate(0.0, -0.01, 1e-9)]),
        Line("b", [Estimate(3.7, 2.0, 5.0), Estimate(3.7), Estimate(3.7)]),
    ]
    chart = ElementTree.fromstring(line_chart("T", "x", "y", ["p", "q", "r"], lines, lowest))
    space = "{http://www.w3.org/2000/svg}"
    dots = chart.findall(f"{space}circle")
    assert len(dots) == 5
    heights = [float(dot.attrib["cy"]) for dot in dots]
    assert all(40 <= height <= 344 for height in heights)
    assert heights[2] < heights[0] < heights[1], "a larger value lies higher"
    with pytest.raises(ValueError, match="value"):
        line_chart("T", "x", "y", ["p"], [Line("a", [None])])
