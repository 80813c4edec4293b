"""The picture of a plan: both sides' ranks with their KV heads, and the reads between them.

Refuses to depend on its surroundings: colours are readable on white and on dark, fonts are the
reader's own, and what is drawn is also told in words.
"""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kvbus.geometry import EngineSpec
from kvbus.plan.columns import DrawnRank, cell_height, column
from kvbus.plan.explanation import describe_group, describe_heads, explain_choice
from kvbus.plan.plan import Plan, PlannedRead
from kvbus.text import bytes_text, numbers_text

WIDTH, MARGIN, LINE = 960, 24, 18
LABEL, BOX = 210, 56
LEFT, RIGHT = MARGIN + LABEL, WIDTH - MARGIN - LABEL - BOX
GREY = "#787878"
COLOURS = ("#2f86d0", "#d9730d", "#2a9d6f", "#b0529e", "#a08000", "#d0524a", "#5b77d8", "#3b9aa8")
LEAST_LINED_CELL, LEAST_NUMBERED_CELL = 4.0, 12.0
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
    engines = plan.prefill.engine, plan.decode.engine
    cell = cell_height(*engines)
    sides = [column(engine, cell) for engine in engines]
    top = MARGIN + LINE * (len(plan.decode.engine.groups) + 2) + 8
    height = top + max(side[-1].top + side[-1].height for side in sides) + 2 * LINE + MARGIN
    size = {"width": str(WIDTH), "height": f"{round(height)}"}
    svg = Element("svg", _ROOT | size | {"viewBox": f"0 0 {WIDTH} {round(height)}"})
    first, stop = plan.request.first_token, plan.request.num_tokens
    _add(svg, "title", f"Who reads tokens {first} to {stop} from whom", id="title")
    _add(svg, "desc", _description(plan), id="desc")
    _draw_legend(svg, plan)
    body = _add(svg, "g", transform=f"translate(0 {top})")
    for ranks, engine, x in zip(sides, engines, (LEFT, RIGHT), strict=True):
        unread = plan.unread_ranks if x == LEFT else ()
        for rank in ranks:
            _draw_rank(body, rank, engine, x=x, is_read=rank.number not in unread)
            _draw_heads(body, rank, _colours(plan), x=x)
    for read in plan.reads:
        _draw_read(body, plan, read, sides[0][read.prefill_rank], sides[1][read.decode_rank])
    why = explain_choice(plan).split("; ")[0]
    _write(svg, f"{plan.chosen}: {why}", MARGIN, height - MARGIN)
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"


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


def _draw_legend(svg: Element, plan: Plan) -> None:
    y = MARGIN + LINE / 2
    for group in plan.decode.engine.groups:
        _add(svg, "rect", x=MARGIN, y=y - 9, width=10, height=10, fill=_colours(plan)[group.name])
        num_bytes = sum(read.num_bytes for read in plan.reads if read.group == group.name)
        _write(svg, f"{describe_group(group)} ({bytes_text(num_bytes)})", MARGIN + 16, y)
        y += LINE
    y += LINE
    for name, engine, x in (("prefill", plan.prefill, LEFT + BOX), ("decode", plan.decode, RIGHT)):
        stages = f", pp={engine.engine.pp_size}" if engine.engine.pp_size > 1 else ""
        text = _write(svg, f"{name}, tp={engine.engine.tp_size}{stages}", x, y)
        text.set("font-weight", "bold")
        text.set("text-anchor", "start" if x == RIGHT else "end")


def _draw_rank(
    body: Element, rank: DrawnRank, engine: EngineSpec, *, x: float, is_read: bool
) -> None:
    label = _rank_label(rank, engine)
    frame = _add(body, "rect", x=x, y=rank.top, width=BOX, height=rank.height, rx=2)
    frame.attrib |= {"class": "rank", "fill": "none", "stroke": GREY}
    if not is_read:
        frame.set("stroke-dasharray", "3 3")
    _add(frame, "title", label)
    label_x, anchor = (x - 8, "end") if x == LEFT else (x + BOX + 8, "start")
    _write(body, label, label_x, rank.top + 11, anchor)


def _draw_heads(body: Element, rank: DrawnRank, colours: dict[str, str], *, x: float) -> None:
    """A bar of each group, a line between two heads and the number of each, where there is room."""
    for bar in rank.bars:
        drawn = _add(body, "rect", x=x, y=bar.top, width=BOX, height=bar.height)
        drawn.attrib |= {"fill": colours[bar.group], "fill-opacity": "0.12"}
        for head in bar.heads:
            y = bar.y(head)
            if bar.cell >= LEAST_LINED_CELL and head > bar.heads.start:
                _add(body, "line", x1=x, x2=x + BOX, y1=y, y2=y, stroke=GREY, opacity=0.4)
            if bar.cell >= LEAST_NUMBERED_CELL:
                _write(body, str(head), x + BOX / 2, y + bar.cell - 4, "middle")


def _rank_label(rank: DrawnRank, engine: EngineSpec) -> str:
    words = [f"rank {rank.number}"]
    if engine.pp_size > 1:
        words.append(f"layers {numbers_text(rank.layers)}")
    if len({bar.heads for bar in rank.bars}) == 1:
        heads = rank.bars[0].heads
        words.append(f"head{'s' if len(heads) > 1 else ''} {numbers_text(heads)}")
    return ", ".join(words)


def _draw_read(
    body: Element, plan: Plan, read: PlannedRead, holder: DrawnRank, reader: DrawnRank
) -> None:
    (top, bottom), (to_top, to_bottom) = holder.interval(read), reader.interval(read)
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


def _write(at: Element, text: str, x: float, y: float, anchor: str = "start") -> Element:
    element = _add(at, "text", text, x=x, y=y)
    element.set("text-anchor", anchor)
    return element


def _add(at: Element, tag: str, text: str | None = None, **look: str | float) -> Element:
    element = SubElement(
        at, tag, {key: one if isinstance(one, str) else f"{one:g}" for key, one in look.items()}
    )
    element.text = text
    return element
