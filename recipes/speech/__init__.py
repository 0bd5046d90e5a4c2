"""Speech that espeak-ng reads aloud: models of CTC that learn from 5 seconds and are tested on up to 10 minutes."""
