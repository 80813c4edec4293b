"""What only a prefill engine does: offers of all sizes, offers that grow, blocks that come back."""

from functools import partial

from kvbus.conform.offers import OfferDesk
from kvbus.conform.stage import Stage
from kvbus.protocol.engine import Outcome, WithdrawOffer


def sizes(stage: Stage) -> None:
    """Sealed offers: one token, whole blocks, parts of blocks, none."""
    block, desk = stage.desk.block_size(), _desk(stage)
    window = max(desk.windows(), default=block)
    for num_tokens in (1, block - 1 or 1, block, 2 * block + 1, window + 2 * block + 3, 0):
        job = desk.begin(num_tokens)
        answered = stage.accepted(job)
        if not stage.book.expect("offer.answered", answered, f"no `offer` for request {job.name}"):
            return
        stage.over(job)


def grows(stage: Stage) -> None:
    """Open offers: from nothing, within a block, over several blocks."""
    block, desk = stage.desk.block_size(), _desk(stage)
    for counts in ((0, 2, block + 1, block + 2, 3 * block), (block, 2 * block)):
        job = desk.begin(*counts)
        if not stage.accepted(job):
            stage.never_asked(job)
            return
        sealed = stage.wait(partial(desk.is_sealed, job))
        stage.book.expect("offer.sealed", sealed, f"request {job.name} of {counts} was not sealed")
        have = desk.num_ready.get(job.name)
        grown = f"request {job.name}: {have} tokens were announced of {job.num_tokens}"
        stage.book.expect("offer.extend", have == job.num_tokens, grown)
        stage.over(job)


def blocks(stage: Stage) -> None:
    """Of several offers one is withdrawn: the blocks of all stay until `released`."""
    desk, block = _desk(stage), stage.desk.block_size()
    first, *others = (desk.begin(block + 1), desk.begin(block), desk.begin(2 * block))
    if not stage.accepted(first, *others):
        stage.never_asked(first, *others)
        return
    stage.wait(lambda: stage.engine.told("ticket", first.name))
    before = len(stage.agent.log)
    stage.engine.say("withdraw", first.name)
    withdrawn = stage.wait(lambda: stage.agent.asked(WithdrawOffer.op, before))
    stage.book.expect("offer.answered", withdrawn, f"no `withdraw` for request {first.name}")
    stage.use_all_blocks("offer.reused")
    stage.agent.notify(*desk.released(first, Outcome.WITHDRAWN))
    stage.seen_over(first)
    stage.over(*others)
    stage.use_all_blocks("offer.reused")


def _desk(stage: Stage) -> OfferDesk:
    if not isinstance(stage.desk, OfferDesk):
        raise TypeError("a scene of prefill engines")
    return stage.desk
