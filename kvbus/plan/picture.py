"""The picture of a plan: both sides' ranks with their KV heads, and the reads between them.

Refuses to depend on its surroundings: colours are readable on white and on dark, fonts are the
reader's own, and what is drawn is also told in words.
"""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kvbus.geometry import EngineSpec
from kvbus.plan.columns import DrawnRank, cell_height, column
from kvbus.plan.plan import Plan, Read
from kvbus.plan.reason import reason
from kvbus.plan.shown import shown_bytes, shown_numbers
from kvbus.plan.table import group_line, heads_of

WIDTH, MARGIN, LINE = 960, 24, 18
LABEL, BOX = 210, 56
LEFT, RIGHT = MARGIN + LABEL, WIDTH - MARGIN - LABEL - BOX
GREY = "#787878"
COLOURS = ("#2f86d0", "#d9730d", "#2a9d6f", "#b0529e", "#a08000", "#d0524a", "#5b77d8", "#3b9aa8")
LEAST_LINED_CELL, LEAST_NUMBERED_CELL = 4.0, 12.0


def picture(plan: Plan) -> str:
    """The picture as SVG text."""
    cell = cell_height(plan.prefill.engine, plan.decode.engine)
    sides = [column(side.engine, cell) for side in (plan.prefill, plan.decode)]
    top = MARGIN + LINE * (len(plan.decode.engine.groups) + 2) + 8
    height = top + max(side[-1].top + side[-1].height for side in sides) + 2 * LINE + MARGIN
    svg = _frame(plan, round(height))
    _write_legend(svg, plan)
    body = SubElement(svg, "g", transform=f"translate(0 {top})")
    unread, colours = set(plan.unread_ranks), _colours(plan)
    for rank in sides[0]:
        _draw_rank(body, rank, plan.prefill.engine, x=LEFT, is_read=rank.number not in unread)
        _draw_heads(body, rank, colours, x=LEFT)
    for rank in sides[1]:
        _draw_rank(body, rank, plan.decode.engine, x=RIGHT, is_read=True)
        _draw_heads(body, rank, colours, x=RIGHT)
    for read in plan.reads:
        ends = sides[0][read.share.holder], sides[1][read.share.reader]
        _draw_read(body, plan, read, ends=ends, colour=colours[read.share.group])
    why = reason(plan).split("; ")[0]
    _write(svg, f"{plan.chosen.path}: {why}", MARGIN, height - MARGIN)
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"


def _frame(plan: Plan, height: int) -> Element:
    svg = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH} {height}",
            "width": str(WIDTH),
            "height": str(height),
            "role": "img",
            "aria-labelledby": "title desc",
            "font-family": "system-ui, sans-serif",
            "font-size": "12",
            "fill": GREY,
        },
    )
    first, stop = plan.request.first_token, plan.request.num_tokens
    SubElement(svg, "title", id="title").text = f"Who reads tokens {first} to {stop} from whom"
    SubElement(svg, "desc", id="desc").text = _told(plan)
    return svg


def _told(plan: Plan) -> str:
    prefill, decode = plan.prefill.engine.num_ranks, plan.decode.engine.num_ranks
    whole = (
        f"On the left the {prefill} ranks of the prefill engine with their KV heads, on the right"
        f" the {decode} of the decode engine; {len(plan.reads)} reads between them move"
        f" {shown_bytes(plan.num_bytes)}. Path {plan.chosen.path}: {reason(plan)}."
    )
    if plan.reads and plan.unread_ranks:
        whole += f" Nothing is read from prefill ranks {shown_numbers(plan.unread_ranks)}."
    return whole


def _colours(plan: Plan) -> dict[str, str]:
    groups = plan.decode.engine.groups
    return {group.name: COLOURS[number % len(COLOURS)] for number, group in enumerate(groups)}


def _write_legend(svg: Element, plan: Plan) -> None:
    colours = _colours(plan)
    y = MARGIN + LINE / 2
    for group in plan.decode.engine.groups:
        box = {"x": str(MARGIN), "y": f"{y - 9:g}", "width": "10", "height": "10"}
        SubElement(svg, "rect", box, fill=colours[group.name])
        num_bytes = sum(read.num_bytes for read in plan.reads if read.share.group == group.name)
        _write(svg, f"{group_line(group)} ({shown_bytes(num_bytes)})", MARGIN + 16, y)
        y += LINE
    y += LINE
    _write(svg, f"prefill, {_shape(plan.prefill.engine)}", LEFT + BOX, y, anchor="end", bold=True)
    _write(svg, f"decode, {_shape(plan.decode.engine)}", RIGHT, y, bold=True)


def _shape(engine: EngineSpec) -> str:
    stages = f", pp={engine.pp_size}" if engine.pp_size > 1 else ""
    return f"tp={engine.tp_size}{stages}"


def _draw_rank(
    body: Element, rank: DrawnRank, engine: EngineSpec, *, x: float, is_read: bool
) -> None:
    box = {"x": f"{x}", "y": f"{rank.top:g}", "width": f"{BOX}", "height": f"{rank.height:g}"}
    look = {"class": "rank", "rx": "2", "fill": "none", "stroke": GREY}
    frame = SubElement(body, "rect", box | look | ({} if is_read else {"stroke-dasharray": "3 3"}))
    SubElement(frame, "title").text = _rank_words(rank, engine)
    label_x, anchor = (x - 8, "end") if x == LEFT else (x + BOX + 8, "start")
    _write(body, _rank_words(rank, engine), label_x, rank.top + 11, anchor=anchor)


def _draw_heads(body: Element, rank: DrawnRank, colours: dict[str, str], *, x: float) -> None:
    """A bar of each group, a line between two heads and the number of each, where there is room."""
    for bar in rank.bars:
        box = {"x": f"{x}", "y": f"{bar.top:g}", "width": f"{BOX}", "height": f"{bar.height:g}"}
        SubElement(body, "rect", {**box, "fill": colours[bar.group], "fill-opacity": "0.12"})
        for head in bar.heads:
            y, end = bar.interval(head, 1)
            if bar.cell >= LEAST_LINED_CELL and head > bar.heads.start:
                ends = {"x1": f"{x}", "x2": f"{x + BOX}", "y1": f"{y:g}", "y2": f"{y:g}"}
                SubElement(body, "line", ends, stroke=GREY, opacity="0.4")
            if bar.cell >= LEAST_NUMBERED_CELL:
                _write(body, str(head), x + BOX / 2, end - 4, anchor="middle")


def _rank_words(rank: DrawnRank, engine: EngineSpec) -> str:
    words = [f"rank {rank.number}"]
    if engine.pp_size > 1:
        words.append(f"layers {shown_numbers(rank.layers)}")
    kinds = {(bar.heads.start, bar.heads.stop) for bar in rank.bars}
    if len(kinds) == 1:
        heads = rank.bars[0].heads
        words.append(f"head{'s' if len(heads) > 1 else ''} {shown_numbers(heads)}")
    return ", ".join(words)


def _draw_read(
    body: Element, plan: Plan, read: Read, *, ends: tuple[DrawnRank, DrawnRank], colour: str
) -> None:
    (top, bottom), (to_top, to_bottom) = (rank.interval(read.share) for rank in ends)
    x, to_x = LEFT + BOX, RIGHT
    middle = (x + to_x) / 2
    shape = (
        f"M{x} {top:g}C{middle:g} {top:g} {middle:g} {to_top:g} {to_x} {to_top:g}"
        f"V{to_bottom:g}C{middle:g} {to_bottom:g} {middle:g} {bottom:g} {x} {bottom:g}Z"
    )
    look = {"class": "read", "fill": colour, "fill-opacity": "0.3", "stroke": colour}
    band = SubElement(body, "path", {"d": shape, **look})
    share = read.share
    SubElement(band, "title").text = (
        f"decode rank {share.reader} reads {shown_bytes(read.num_bytes)} from prefill rank"
        f" {share.holder}: group {share.group}, layers {shown_numbers(share.layers)},"
        f" heads {heads_of(plan, read)}, positions {read.positions[0]} to {read.positions[1]}"
    )


def _write(
    at: Element, text: str, x: float, y: float, *, anchor: str = "start", bold: bool = False
) -> None:
    look = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(at, "text", look | ({"font-weight": "bold"} if bold else {})).text = text
