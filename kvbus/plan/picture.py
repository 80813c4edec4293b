"""The picture of a plan: both sides' ranks with their KV heads, and the reads between them.

Refuses to depend on its surroundings: colours are readable on white and on dark, fonts are the
reader's own, and what is drawn is also told in words. Sizes are in pixels; y goes down.
"""

from collections.abc import Iterator
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kvbus.geometry import EngineSpec, held_heads, held_layers
from kvbus.plan.plan import Plan, PlannedRead
from kvbus.plan.report import describe_group, describe_heads, explain_choice
from kvbus.text import bytes_text, numbers_text

WIDTH, MARGIN, LINE = 960, 24, 18
LABEL, BOX = 210, 56
LEFT, RIGHT = MARGIN + LABEL, WIDTH - MARGIN - LABEL - BOX
TOTAL_HEIGHT = 560.0
LEAST_CELL, MOST_CELL = 1.5, 16.0
LEAST_LINED_CELL, LEAST_NUMBERED_CELL = 4.0, 12.0
LEAST_RANK = 15.0
RANK_GAP, BAR_GAP, STAGE_GAP = 6.0, 3.0, 14.0
GREY = "#787878"
COLOURS = ("#2f86d0", "#d9730d", "#2a9d6f", "#b0529e", "#a08000", "#d0524a", "#5b77d8", "#3b9aa8")
_ROOT = {
    "xmlns": "http://www.w3.org/2000/svg",
    "role": "img",
    "aria-labelledby": "title desc",
    "font-family": "system-ui, sans-serif",
    "font-size": "12",
    "fill": GREY,
}


def picture(plan: Plan) -> str:
    """The picture as SVG text."""
    svg = Element("svg", _ROOT)
    first, stop = plan.options.first_token, plan.options.tokens
    _add(svg, "title", f"Who reads tokens {first} to {stop} from whom", id="title")
    _add(svg, "desc", _description(plan), id="desc")
    top = _draw_legend(svg, plan)
    body = _add(svg, "g", transform=f"translate(0 {top:g})")
    engines = plan.prefill.engine, plan.decode.engine
    cell = min(MOST_CELL, max(LEAST_CELL, TOTAL_HEIGHT / max(map(_num_heads, engines))))
    sides = [Column(body, cell, x=x, colours=_colours(plan)) for x in (LEFT, RIGHT)]
    for side, engine in zip(sides, engines, strict=True):
        side.draw(engine, unread=plan.unread_ranks if side is sides[0] else ())
    for read in plan.reads:
        _draw_read(body, plan, read, sides)
    height = top + max(side.bottom for side in sides) + 2 * LINE + MARGIN
    why = explain_choice(plan).split("; ")[0]
    _add(svg, "text", f"{plan.chosen}: {why}", x=MARGIN, y=height - MARGIN)
    size = {"width": f"{WIDTH}", "height": f"{height:.0f}", "viewBox": f"0 0 {WIDTH} {height:.0f}"}
    svg.attrib |= size
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"


class Column:
    """The ranks of one side, from y = 0 down, a bar for each group of a rank.

    A bar has a cell for each head; a state has a bar for each of its parts.
    """

    def __init__(self, body: Element, cell: float, *, x: float, colours: dict[str, str]) -> None:
        self._body, self._cell, self._x, self._colours = body, cell, x, colours
        self._head_0: dict[tuple[int, str, str], float] = {}
        self.bottom = 0.0

    def draw(self, engine: EngineSpec, *, unread: tuple[int, ...]) -> None:
        """All ranks; those that nothing is read from are dashed."""
        for rank in range(engine.num_ranks):
            if rank:
                self.bottom += RANK_GAP if rank % engine.tp_size else STAGE_GAP
            self._draw_rank(engine, rank, is_read=rank not in unread)

    def interval(self, rank: int, read: PlannedRead) -> tuple[float, float]:
        """Where the heads of ``read`` lie in ``rank``."""
        head_0 = self._head_0[rank, read.group, read.parts[0]]
        first, stop = read.heads
        return head_0 + first * self._cell, head_0 + stop * self._cell

    def _draw_rank(self, engine: EngineSpec, rank: int, *, is_read: bool) -> None:
        top, bars = self.bottom, list(_held(engine, rank))
        label = _rank_label(engine, rank, [heads for *_, heads in bars])
        frame = _add(self._body, "rect", x=self._x, y=top, width=BOX, rx=2)
        frame.attrib |= {"class": "rank", "fill": "none", "stroke": GREY}
        if not is_read:
            frame.set("stroke-dasharray", "3 3")
        _add(frame, "title", label)
        text = _add(self._body, "text", label, y=top + 11)
        is_left = self._x == LEFT
        text.set("x", f"{self._x - 8 if is_left else self._x + BOX + 8:g}")
        text.set("text-anchor", "end" if is_left else "start")
        end = top
        for group, parts, heads in bars:
            self._draw_bar(group, heads, end)
            for part in parts:
                self._head_0[rank, group, part] = end - heads.start * self._cell
            end += len(heads) * self._cell + BAR_GAP
        height = max(LEAST_RANK, end - BAR_GAP - top)
        frame.set("height", f"{height:g}")
        self.bottom = top + height

    def _draw_bar(self, group: str, heads: range, top: float) -> None:
        """A line between two heads, and the number of each, where there is room."""
        x, cell = self._x, self._cell
        bar = _add(self._body, "rect", x=x, y=top, width=BOX, height=len(heads) * cell)
        bar.attrib |= {"fill": self._colours[group], "fill-opacity": "0.12"}
        for number, head in enumerate(heads):
            y = top + number * cell
            if cell >= LEAST_LINED_CELL and number:
                _add(self._body, "line", x1=x, x2=x + BOX, y1=y, y2=y, stroke=GREY, opacity=0.4)
            if cell >= LEAST_NUMBERED_CELL:
                text = _add(self._body, "text", str(head), x=x + BOX / 2, y=y + cell - 4)
                text.set("text-anchor", "middle")


def _held(engine: EngineSpec, rank: int) -> Iterator[tuple[str, tuple[str, ...], range]]:
    """The heads of each group that the rank has layers of, a state's for each of its parts."""
    layers = held_layers(engine, rank)
    for group in engine.groups:
        if layers.isdisjoint(group.layers):
            continue
        for parts in [(part,) for part in group.parts] if group.state else [group.parts]:
            num_heads = group.part_shape(parts[0]).num_heads
            yield group.name, parts, held_heads(rank % engine.tp_size, engine.tp_size, num_heads)


def _num_heads(engine: EngineSpec) -> int:
    """Cells of all ranks."""
    return sum(len(heads) for rank in range(engine.num_ranks) for *_, heads in _held(engine, rank))


def _rank_label(engine: EngineSpec, rank: int, bars: list[range]) -> str:
    words = [f"rank {rank}"]
    if engine.pp_size > 1:
        words.append(f"layers {numbers_text(held_layers(engine, rank))}")
    if len(set(bars)) == 1:
        heads = bars[0]
        words.append(f"head{'s' if len(heads) > 1 else ''} {numbers_text(heads)}")
    return ", ".join(words)


def _description(plan: Plan) -> str:
    prefill, decode = plan.prefill.engine.num_ranks, plan.decode.engine.num_ranks
    whole = (
        f"On the left the {prefill} ranks of the prefill engine with their KV heads, on the right"
        f" the {decode} of the decode engine; {len(plan.reads)} reads between them move"
        f" {bytes_text(plan.num_bytes)}. Path {plan.chosen}: {explain_choice(plan)}."
    )
    if plan.reads and plan.unread_ranks:
        whole += f" Nothing is read from prefill ranks {numbers_text(plan.unread_ranks)}."
    return whole


def _colours(plan: Plan) -> dict[str, str]:
    groups = plan.decode.engine.groups
    return {group.name: COLOURS[number % len(COLOURS)] for number, group in enumerate(groups)}


def _draw_legend(svg: Element, plan: Plan) -> float:
    """The groups, and a title above each column; returns where it ends."""
    y = MARGIN + LINE / 2
    for group in plan.decode.engine.groups:
        _add(svg, "rect", x=MARGIN, y=y - 9, width=10, height=10, fill=_colours(plan)[group.name])
        num_bytes = sum(read.num_bytes for read in plan.reads if read.group == group.name)
        text = f"{describe_group(group)} ({bytes_text(num_bytes)})"
        _add(svg, "text", text, x=MARGIN + 16, y=y)
        y += LINE
    y += LINE
    for name, side, x in (("prefill", plan.prefill, LEFT + BOX), ("decode", plan.decode, RIGHT)):
        stages = f", pp={side.engine.pp_size}" if side.engine.pp_size > 1 else ""
        title = _add(svg, "text", f"{name}, tp={side.engine.tp_size}{stages}", x=x, y=y)
        anchor = "start" if x == RIGHT else "end"
        title.attrib |= {"font-weight": "bold", "text-anchor": anchor}
    return y + LINE / 2 + 8


def _draw_read(body: Element, plan: Plan, read: PlannedRead, sides: list[Column]) -> None:
    top, bottom = sides[0].interval(read.prefill_rank, read)
    to_top, to_bottom = sides[1].interval(read.decode_rank, read)
    x, to_x = LEFT + BOX, RIGHT
    middle = (x + to_x) / 2
    shape = (
        f"M{x} {top:g}C{middle:g} {top:g} {middle:g} {to_top:g} {to_x} {to_top:g}"
        f"V{to_bottom:g}C{middle:g} {to_bottom:g} {middle:g} {bottom:g} {x} {bottom:g}Z"
    )
    colour = _colours(plan)[read.group]
    band = _add(body, "path", d=shape, fill=colour, stroke=colour)
    band.attrib |= {"class": "read", "fill-opacity": "0.3"}
    text = (
        f"decode rank {read.decode_rank} reads {bytes_text(read.num_bytes)} from prefill rank"
        f" {read.prefill_rank}: group {read.group}, layers {numbers_text(read.layers)},"
        f" heads {describe_heads(plan, read)}, positions {read.positions[0]} to {read.positions[1]}"
    )
    _add(band, "title", text)


def _add(at: Element, tag: str, text: str | None = None, **look: str | float) -> Element:
    shown = {key: one if isinstance(one, str) else f"{one:g}" for key, one in look.items()}
    element = SubElement(at, tag, shown)
    element.text = text
    return element
