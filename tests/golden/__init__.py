"""Files that earlier versions wrote, which must keep loading, and the scripts that made them."""
