"""Lineage: `record` writes what was made from what; `prove` walks it back and hashes every byte again."""
