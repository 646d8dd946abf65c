"""Write what runs log, thousands of times per second: grouped, or as single points."""
