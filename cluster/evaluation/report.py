"""What does a reader get? Tables, charts, and what may be concluded from them, as Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ripresa.cluster.evaluation.arms import EXACT
from ripresa.cluster.evaluation.bootstrap import FEWEST, Estimate
from ripresa.cluster.evaluation.crossing import Crossing, crossings, row_layers
from ripresa.cluster.evaluation.experiments import BOUNDED, DEPTHS, Experiment
from ripresa.cluster.evaluation.measures import CONTEXT, OVERLAP, SUPERVISED, bucket_names
from ripresa.cluster.evaluation.plots import Line, line_chart
from ripresa.cluster.evaluation.summary import (
    ALL,
    CheckRow,
    CostRow,
    HitRow,
    MatchRow,
    ServedRow,
    Summary,
    TokenRow,
)
from ripresa.cluster.evaluation.tails import MATTERS, TailRow, chosen
from ripresa.workers.config import DEFAULT_ANCHOR_INTERVAL
from ripresa.workers.replay import TailVariant

RESULTS = "results.json"
REPORT = "report.md"
_LEAST_KL = 1e-6
"""Nats; a chart shows nothing below."""
_HALVES = (
    (Experiment.ANSWER, "decoder"),
    (Experiment.ANSWER, "both"),
    (Experiment.HIT, "both"),
)
"""First words of the arms of a chart."""
_COLD_NLL = "reference nll"

_COUNTED = (
    f"A line of fewer than {FEWEST} conversations has counts for shares: nothing follows from it."
)

_PAGE = Path(__file__).parent / "page.md"
"""What is said whatever the numbers are."""


@dataclass(frozen=True, slots=True)
class About:
    """What a report is of.

    Attributes:
        command: that makes it again.
        facts: name and value of everything that decides the numbers.
        window, anchor: W and A in tokens.
        default_tail: what `ripresa serve` has for requests that name none.
        default_anchor: A of `ripresa serve`, unless a setting says otherwise, in tokens.
    """

    command: str
    facts: Mapping[str, str]
    window: int
    anchor: int
    default_tail: TailVariant = TailVariant.FLOORED
    default_anchor: int = DEFAULT_ANCHOR_INTERVAL


def write_report(summary: Summary, about: About, report: Path, charts: Path) -> None:
    """Write the page and its charts.

    Args:
        report: the page's file.
        charts: the charts' folder.

    Raises:
        OSError: they cannot be written.
    """
    charts.mkdir(parents=True, exist_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    drawn = dict(_charts(summary, about.window))
    for name, svg in drawn.items():
        (charts / f"{name}.svg").write_text(svg, encoding="utf-8")
    place = Path(os.path.relpath(charts, report.parent))
    links = {name: f"![{name}]({(place / name).as_posix()}.svg)\n" for name in drawn}
    report.write_text(page(summary, about, links), encoding="utf-8")


def write_results(summary: Summary, about: About, path: Path) -> None:
    """Everything that the page shows, as JSON; raises OSError."""
    document = {"about": asdict(about), **asdict(summary)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def page(summary: Summary, about: About, links: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        links: what shows each chart, by its name.
    """
    facts = "\n".join(f"| {name} | {value} |" for name, value in about.facts.items())
    return _PAGE.read_text(encoding="utf-8").format(
        command=about.command,
        facts=facts,
        window=about.window,
        anchor=about.anchor,
        default_anchor=about.default_anchor,
        fewest=FEWEST,
        sections="\n".join(_sections(summary, about, links)),
    )


def _sections(summary: Summary, about: About, links: Mapping[str, str]) -> Iterator[str]:
    window = about.window

    def shown(*names: str) -> str:
        return "\n".join(links[name] for name in names if name in links)

    brief = list(_brief(summary, about))
    if brief:
        yield "## In brief\n\n" + "\n".join(brief) + "\n"
    yield "## Self-check\n\n" + "\n".join(_checked(row) for row in summary.checks) + "\n"
    tables = {
        Experiment.ANSWER: (
            "The answer's boundary: what is served",
            "The prompt ends where an answer begins, behind a hit that ends at least "
            f"{window + 6} tokens before. Distances count from the answer's first token.",
        ),
        Experiment.HIT: (
            "The hit's boundary: both halves restart where the cached prefix ends",
            "Nobody is served the first of these tokens: the rules leave a window of native rows "
            "before an answer. But the block KV written there is kept, and read by all that "
            "follows. Distances count from the end of the cached prefix.",
        ),
    }
    for experiment, (title, text) in tables.items():
        rows = [row for row in summary.tokens if row.experiment == experiment]
        if not rows:
            continue
        yield f"## {title}\n\n{text}\n"
        hits = [row for row in summary.hits if row.experiment == experiment]
        if hits:
            yield _hit_table(hits, window)
        halves = [half for where, half in _HALVES if where is experiment]
        yield shown(
            *(f"{experiment}-{half}-{kind}" for half in halves for kind in (SUPERVISED, CONTEXT)),
            f"{experiment}-overlap",
        )
        for kind in (SUPERVISED, CONTEXT):
            yield f"### {kind.capitalize()} tokens\n"
            mine = [row for row in rows if row.kind == kind]
            columns = [*bucket_names(window), ALL]
            yield from _token_tables(mine, "arm", columns, lambda row: row.bucket)
        yield from _match_tables([m for m in summary.matches if m.experiment == experiment])
    if summary.tails:
        yield from _tails(summary.tails, about)
    rows = [row for row in summary.tokens if row.experiment == Experiment.STACK]
    if rows:
        yield (
            "## Boundaries behind boundaries\n\nOne and the same prompt and answer; its prefix was "
            "computed by so many turns of a tool loop, each a bounded hit on the blocks of the "
            f"one before, with {window} new tokens a turn. A sequence is several conversations, "
            "one behind the other, and counts as one here. 0: an exact prefix, with the trimmed "
            "tail.\n"
        )
        yield shown("stack")
        whole = [row for row in rows if row.bucket == ALL]
        kinds = [SUPERVISED, CONTEXT]
        yield from _token_tables(whole, "hits behind one another", kinds, lambda row: row.kind)
    yield from _costs(summary.costs, shown("rows", "seconds"))
    if summary.served:
        yield (
            "## Through the server\n\nEvery message of the conversations, asked of a gateway at "
            "temperature 0 behind the reference's text, in order: each prompt goes on from what "
            "the one before has left in the workers' caches. Windows that these keep spare "
            "replays, so `both` is what is served, and by default seldom a replay; workers with "
            "`windows.policy` `zero` keep none. *By kind* says what it was here: `window` found "
            "one, `bounded` replayed.\n"
        )
        yield _served_table(summary.served)
        yield from _match_tables([m for m in summary.matches if m.experiment == Experiment.SERVED])


def _token_tables(
    rows: Sequence[TokenRow], first: str, columns: Sequence[str], of: Callable[[TokenRow], str]
) -> Iterator[str]:
    """How many tokens there are, then a table a measure: a line an arm.

    Args:
        first: what the arms are called.
        columns: in order; those that no row is in are left out.
        of: a row's column.
    """
    columns = [column for column in columns if any(of(row) == column for row in rows)]
    arms = list(dict.fromkeys(row.arm for row in rows))
    found = {(row.arm, of(row)): row for row in rows}
    sizes = {column: next(row for row in rows if of(row) == column) for column in columns}
    yield _table(
        ["", *columns],
        [
            ["tokens", *[str(sizes[column].num_tokens) for column in columns]],
            ["conversations", *[str(sizes[column].num_conversations) for column in columns]],
            ["NLL, cold", *[f"{sizes[c].measures[_COLD_NLL].mean:.3f}" for c in columns]],
        ],
    )
    layers = sorted({name for row in rows for name in row.measures if name.startswith(OVERLAP)})
    shown: list[tuple[str, str, str, bool]] = [
        ("dNLL", "difference", ".4f", True),
        ("KL", "kl", ".2e", False),
        ("same top", "same top", ".3f", False),
        *[(layer, layer, ".3f", False) for layer in layers],
    ]
    for title, name, form, signed in shown:
        body = []
        for arm in arms:
            cells = [found.get((arm, column)) for column in columns]
            told = [
                "" if row is None else _told(row.measures[name], form, signed=signed)
                for row in cells
            ]
            body.append([f"`{arm}`", *told])
        yield f"**{title}**\n"
        yield _table([first, *columns], body)


def _match_tables(rows: Sequence[MatchRow]) -> Iterator[str]:
    whole = [row for row in rows if row.placement is None]
    if whole:
        yield (
            "### Exact match\n\nThe share of the assistant's messages of which every token is the "
            "likeliest one: what greedy decoding behind the reference's text would have said. "
            f"{_COUNTED}\n"
        )
        yield _matrix(whole, [(row.task, row) for row in whole], "task")
    placed = [row for row in rows if row.placement is not None]
    if placed:
        yield (
            f"By where the evidence lies to the boundary b, of a window of W tokens. {_COUNTED}\n"
        )
        yield _matrix(placed, [(str(row.placement), row) for row in placed], "evidence")


def _matrix(rows: Sequence[MatchRow], named: Sequence[tuple[str, MatchRow]], what: str) -> str:
    """A line a name, a column an arm."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    names = sorted(dict.fromkeys(name for name, _ in named), key=_task_order)
    cells = {(name, row.arm): row for name, row in named}
    body = []
    for name in names:
        first = next(cells[name, arm] for arm in arms if (name, arm) in cells)
        body.append(
            [
                name,
                str(first.num_messages),
                str(first.num_conversations),
                *[_matched(cells[name, arm]) if (name, arm) in cells else "" for arm in arms],
            ]
        )
    return _table([what, "messages", "conversations", *[f"`{arm}`" for arm in arms]], body)


def _matched(row: MatchRow) -> str:
    """A share with its interval, or the counts alone where there are too few conversations."""
    if row.num_conversations < FEWEST:
        return f"{row.exact.mean * row.num_messages:.0f} of {row.num_messages}"
    return _told(row.exact, ".2f")


def _task_order(name: str) -> tuple[int, str]:
    """T2 before T10, and all of them together last."""
    number = name.split()[0].removeprefix("T")
    return (int(number) if number.isdigit() else 99, name)


def _brief(summary: Summary, about: About) -> Iterator[str]:
    """The figures that answer the page's question; each is in a table below as well."""
    served, deepest = f"both {about.window}", str(max(DEPTHS))
    said = {
        (Experiment.ANSWER, served): "What is served by default, behind a hit",
        (Experiment.HIT, served): "Both halves restarted at the end of a hit, served to nobody",
        (Experiment.STACK, deepest): f"Behind {deepest} bounded hits behind one another",
    }
    found = {
        (row.experiment, row.arm): row
        for row in summary.tokens
        if row.kind == SUPERVISED and row.bucket == ALL
    }
    for (experiment, arm), text in said.items():
        row = found.get((experiment, arm))
        if row is not None:
            cases = "sequences" if experiment is Experiment.STACK else "conversations"
            yield (
                f"- {text} (experiment `{experiment}`, arm `{arm}`): KL "
                f"{_told(row.measures['kl'], '.1e')} nats a token, the same top token for "
                f"{row.measures['same top'].mean:.2%}, on {row.num_tokens:,} supervised tokens of "
                f"{row.num_conversations} {cases}."
            )
    tail = chosen(summary.tails, served)
    if tail is not None:
        yield f"- The tail that should be the default: `{tail}` ([why](#which-tail))."
    for crossing in crossings(summary.costs):
        yield f"- {_crossed(crossing)}"


def _checked(row: CheckRow) -> str:
    able = f"in {row.num_able} of {row.num_cases} cases this arm began behind token 0"
    if not row.num_able:
        power = f"{able}: it left nothing out, so this says nothing"
    else:
        power = f"{able}, so that it left rows out and could have differed"
    return (
        f"- `{row.experiment}`: logits of the arm without approximation differ from the cold run's "
        f"by at most {row.worst:.3g}; {power}."
    )


def _hit_table(rows: Sequence[HitRow], window: int) -> str:
    """How long the cached prefixes are: the tables below are about such hits."""
    return _table(
        ["blocks of the hit", *[str(row.num_tokens // window) for row in rows]],
        [["cases", *[str(row.num_cases) for row in rows]]],
    )


def _tails(rows: Sequence[TailRow], about: About) -> Iterator[str]:
    served = f"both {about.window}"
    yield (
        "## Which tail\n\nBoth tails have the same tokens behind the same hits, so each "
        "conversation's difference is drawn, and not the two apart. Above 0, `layer_exact` is "
        "closer to the cold run.\n"
    )
    yield _table(
        [
            *["arm", "tokens", "conversations", "KL `floored`", "KL `layer_exact`"],
            *["KL, difference", "dNLL, difference"],
        ],
        [
            [
                *[f"`{row.arm}`", f"{row.num_tokens} {row.kind}", str(row.num_conversations)],
                *[_told(row.floored, ".2e"), _told(row.layer_exact, ".2e")],
                *[_told(row.kl, ".2e", signed=True), _told(row.nll, ".2e", signed=True)],
            ]
            for row in rows
        ],
    )
    yield "What `layer_exact` costs, a prompt up to its answer's first token:\n"
    yield _table(
        ["arm", "encoder row-layers", "more", "decoder row-layers", "more", "s, ratio"],
        [
            [
                f"`{row.arm}`",
                *[f"{part:.0f}" for part in (*row.encoder_row_layers, *row.decoder_row_layers)],
                f"{row.seconds:.2f}",
            ]
            for row in {row.arm: row for row in rows}.values()
        ],
    )
    yield (
        "**Rule.** `floored` computes and hands over the least (`layer_exact` also hands over a "
        "window of layer E's rows, and an exact or anchored hit computes them again), so it is "
        "the default, unless `layer_exact` is "
        f"closer in what is served by default (`{served}`, supervised tokens), beyond doubt and by "
        "something that matters: the whole interval of the paired difference of KL lies above "
        f"{MATTERS:.0e} nats a token.\n"
    )
    tail = chosen(rows, served)
    if tail is None:
        yield "**Choice.** None: there are too few conversations for an interval.\n"
        return
    (kl,) = [row.kl for row in rows if (row.arm, row.kind) == (served, SUPERVISED)]
    agrees = "That is" if tail is about.default_tail else "That is not"
    yield (
        f"**Choice.** `{tail}`: the difference is {_told(kl, '.2e', signed=True)}. {agrees} what "
        f"`ripresa serve` has for requests that name no tail (`default_tail: "
        f"{about.default_tail}`).\n"
    )


def _crossed(crossing: Crossing) -> str:
    """A sentence."""
    first, last = crossing.ratios
    return (
        f"`{BOUNDED.name}` and `{crossing.other}` in {crossing.unit}: {_where(crossing)} "
        f"({crossing.lengths[0]:,} to {crossing.lengths[-1]:,} tokens measured; {first:.2f} of "
        f"them at the shortest, {last:.2f} at the longest)."
    )


def _where(crossing: Crossing) -> str:
    undecided = f"not decided at {', '.join(f'{length:,}' for length in crossing.undecided)} tokens"
    if crossing.undecided == crossing.lengths:
        return "not decided at any measured length"
    if crossing.start is None:
        if not crossing.undecided:
            return f"`{BOUNDED.name}` is not the cheaper at the longest"
        if crossing.dearer is None:
            return f"`{BOUNDED.name}` is nowhere the dearer, and {undecided}"
        return f"`{BOUNDED.name}` is not the cheaper at {crossing.dearer:,} tokens, and {undecided}"
    cheaper = f"`{BOUNDED.name}` is the cheaper at every measured length"
    if crossing.start == crossing.lengths[0]:
        return f"they do not cross in the measured range, {cheaper}"
    onwards = f"from {crossing.start:,} tokens on {cheaper}"
    if crossing.dearer is None:
        return f"{onwards}, and it is {undecided}"
    rest = f", {undecided}" if crossing.undecided else ""
    return f"they cross between {crossing.dearer:,} and {crossing.start:,} tokens{rest}; {onwards}"


def _costs(rows: Sequence[CostRow], charts: str) -> Iterator[str]:
    answer = [row for row in rows if row.experiment == Experiment.ANSWER]
    grown = [row for row in rows if row.experiment == Experiment.GROWTH]
    if not (answer or grown):
        return
    yield (
        "## What it costs\n\nA prompt up to its answer's first token. Row-layers: rows computed, "
        "counted once for each layer. Seconds: one request at a time.\n"
    )
    head = ["arm", "prompts", "tokens skipped", "encoder row-layers", "decoder row-layers", "s"]
    if answer:
        yield "Seconds: the prompts' median and quartiles.\n"
        yield _table(head, [[f"`{row.arm}`", *_cost_cells(row)] for row in answer])
    if grown:
        yield (
            "Behind a hit on all that the rules allow, and with nothing cached, by the prompt's "
            "length. Each prompt is computed several times, arm after arm. Seconds: the median and "
            "its 95 % interval, by ranks; a dash where there are too few runs for one. One is "
            "called the cheaper where the intervals are apart, and elsewhere it is not decided.\n"
        )
        yield charts
        yield "\n".join(f"- {_crossed(crossing)}" for crossing in crossings(rows)) + "\n"
        body = [[f"`{row.arm}`", str(row.num_tokens), *_cost_cells(row)] for row in grown]
        yield _table(["arm", "prompt", *head[1:]], body)


def _served_table(rows: Sequence[ServedRow]) -> str:
    head = [
        *["arm", "prompts", "by kind", "tokens skipped", "recomputed a prompt"],
        *["bounded hits behind one another", "most", "s to first token"],
    ]
    body = [
        [
            f"`{row.arm}`",
            str(row.num_prompts),
            ", ".join(f"{kind} {number}" for kind, number in sorted(row.kinds.items())),
            f"{row.skipped:.1%}",
            f"{row.num_recomputed:.0f}",
            f"{row.num_generations:.2f}",
            str(row.most_generations),
            "" if row.seconds is None else _told(row.seconds, ".3f"),
        ]
        for row in rows
    ]
    return _table(head, body)


def _cost_cells(row: CostRow) -> list[str]:
    return [
        str(row.num_prompts),
        f"{row.num_skipped:.0f}",
        f"{row.encoder_row_layers:.0f}",
        f"{row.decoder_row_layers:.0f}",
        _told(row.seconds, ".3f"),
    ]


def _charts(summary: Summary, window: int) -> Iterator[tuple[str, str]]:
    """Name and SVG of every chart that there are numbers for."""
    buckets = bucket_names(window)
    axis = "distance from the boundary, tokens"
    for experiment, half in _HALVES:
        rows = [r for r in summary.tokens if r.experiment == experiment and r.bucket != ALL]
        mine = [row for row in rows if row.arm.split()[0] == half]
        for kind in (SUPERVISED, CONTEXT):
            found = {(row.arm, row.bucket): row.measures["kl"] for row in mine if row.kind == kind}
            arms = list(dict.fromkeys(arm for arm, _ in found))
            if arms:
                lines = [Line(arm, [found.get((arm, each)) for each in buckets]) for arm in arms]
                title = f"KL from the cold run, {kind} tokens ({experiment})"
                chart = line_chart(title, axis, "nats a token", buckets, lines, _LEAST_KL)
                yield f"{experiment}-{half}-{kind}", chart
        served = [r for r in mine if r.arm == f"both {window}" and r.kind == SUPERVISED]
        layers = sorted({n for row in served for n in row.measures if n.startswith(OVERLAP)})
        if layers:
            by_bucket = {row.bucket: row.measures for row in served}
            lines = [
                Line(layer, [by_bucket[b][layer] if b in by_bucket else None for b in buckets])
                for layer in layers
            ]
            title = f"Selected entries that are the cold run's, arm both {window} ({experiment})"
            yield f"{experiment}-overlap", line_chart(title, axis, "share", buckets, lines)
    yield from _stack_chart(summary.tokens)
    yield from _cost_charts([r for r in summary.costs if r.experiment == Experiment.GROWTH])


def _stack_chart(rows: Iterable[TokenRow]) -> Iterator[tuple[str, str]]:
    found = {
        (row.kind, row.arm): row.measures["kl"]
        for row in rows
        if row.experiment == Experiment.STACK and row.bucket == ALL and row.arm != EXACT
    }
    if found:
        depths = list(dict.fromkeys(depth for _, depth in found))
        kinds = list(dict.fromkeys(kind for kind, _ in found))
        lines = [Line(kind, [found.get((kind, depth)) for depth in depths]) for kind in kinds]
        title = "KL from the cold run, the first window of an answer"
        axis = "bounded hits behind one another"
        yield "stack", line_chart(title, axis, "nats a token", depths, lines, _LEAST_KL)


def _cost_charts(rows: Sequence[CostRow]) -> Iterator[tuple[str, str]]:
    if not rows:
        return
    found = {(row.arm, str(row.num_tokens)): row for row in rows}
    arms = list(dict.fromkeys(arm for arm, _ in found))
    sizes = list(dict.fromkeys(size for _, size in found))

    def line(arm: str, of: Callable[[CostRow], Estimate]) -> Line:
        return Line(arm, [of(found[arm, s]) if (arm, s) in found else None for s in sizes])

    for name, title, unit, of in (
        ("rows", "Rows until the first token", "row-layers", row_layers),
        ("seconds", "Time until the first token", "s", lambda row: row.seconds),
    ):
        lines = [line(arm, of) for arm in arms]
        yield name, line_chart(title, "tokens of the prompt", unit, sizes, lines)


def _told(estimate: Estimate, form: str, *, signed: bool = False) -> str:
    """`1.0 (0.9 to 1.2)`, with a dash where there is no interval."""
    form = f"+{form}" if signed else form
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:{form}} (–)"
    return f"{estimate.mean:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
