"""How many there are of something, as people say it."""


def counted(number: int, thing: str) -> str:
    """`1 file`, `1,200 files`, `2 processes`: of a thing whose plural ends with an s."""
    many = "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{'' if number == 1 else many}"
