"""Copies and what became of them, in short."""

from engine_core.plan import Copy, Landed


def out(device: int, host: int, tag: int = 0) -> Copy:
    return Copy(device, host, tag or 100 + device, out=True)


def back(device: int, host: int, tag: int) -> Copy:
    return Copy(device, host, tag, out=False)


def copies_of(landed: list[Landed], ok: bool = True) -> list[Copy]:
    return [copy for group in landed if group.ok == ok for copy in group.copies]
