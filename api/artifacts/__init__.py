"""Files of runs, logged models and datasets: their storage locations and verified content."""
