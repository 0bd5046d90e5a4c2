"""Files written by earlier versions, which must keep loading, and the scripts that created them."""
