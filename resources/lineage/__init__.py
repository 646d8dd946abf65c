"""Lineage: `edges` records what was made from what.

`proof` follows it back and verifies the hash of every file.
"""
