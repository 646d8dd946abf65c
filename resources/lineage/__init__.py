"""Lineage: `edges` records what was made from what; `proof` walks it back and hashes every byte again."""
