"""A finished run again, from its record alone, and what came out otherwise (rows Y11, Y12)."""
