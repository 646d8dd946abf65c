"""The product on states that earlier releases left: `tests/fixtures` holds them."""
