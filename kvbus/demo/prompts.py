"""The demo's prompts: built-in ones of many lengths, or a file with one a line."""

from pathlib import Path

from kvbus.errors import ConfigError

BUILT_IN = (
    "The KV cache of a prompt is computed once and read for every token after it.",
    "Explain to a patient friend why prefill is bound by compute and decode by memory bandwidth, "
    "and what follows from that for the machines that each of them should run on. Take your time, "
    "use examples from everyday life, and end with one sentence that fits on a postcard.",
    "Schreibe ein kurzes Gedicht über Züge, die nachts Güter über die Grenze bringen.",
    "def handoff(ticket, blocks):\n    '''Move the bytes, then ask whether they may be used.'''\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946",
    "A lease has an epoch. Whoever reads under it asks, after the last byte landed, whether the "
    "epoch was still live; only a yes makes the bytes valid. Summarise this paragraph, then list "
    "three ways in which a reader can be late: it was stopped by the scheduler, the network kept "
    "its packets for a while, or its own clock ran at another speed than it believed. For each of "
    "them say which process notices, and what it does with the blocks.",
    "Übersetze ins Deutsche: the block that was freed last is handed out first.",
    "What is the difference between a page, a block and a chunk? Answer in one line.",
    "猫が静かに窓辺で眠っている。朝の光が差し込む。",
    'Continue the list: {"block": 7, "tokens": [112, 97, 103]}, {"block": 3, "tokens": [101, 100]',
    "Hello, decode!",
    "Two engines share one model. The first reads the question, the second writes the answer, and "
    "between them lies nothing but memory that one of them filled and the other one must not "
    "touch too early. Tell this as a story with a happy end.",
)


def encode(text: str) -> list[int]:
    """Tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The lines of ``path`` that are not blank, or the built-in prompts; raises `ConfigError`."""
    if path is None:
        return BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ConfigError(f"{path} has no prompts: write one a line")
    return prompts
