"""YAML documents that exhaust memory or repeat keys."""

LISTS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)

"""Ten lines that expand to ten billion characters."""

MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))

KEYS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"? &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n: v\n" for n in range(1, 10)
)

BOMBS = {
    "lists": LISTS,
    "merges": MERGES,
    "keys": KEYS,
    "a long text": f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "itself": "a: &a [*a]\n",
}
