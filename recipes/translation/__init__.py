"""Translation of programs' messages: real pairs of sentences that most Linux machines have."""
