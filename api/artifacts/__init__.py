"""Files of runs, logged models and datasets: where they are stored, and that their bytes are the recorded ones."""
