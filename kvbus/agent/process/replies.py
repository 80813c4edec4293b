"""The commands of tables that answer a request."""

from kvbus.bus import Call
from kvbus.table.events import Refuse, SendReply


def send_reply(command: SendReply) -> None:
    """Answer ``ok``; nobody asked when ``reply_to`` is no call."""
    if isinstance(command.reply_to, Call):
        command.reply_to.reply(command.body)


def send_refusal(command: Refuse) -> None:
    """Answer with the error."""
    if isinstance(command.reply_to, Call):
        command.reply_to.refuse(command.error)
