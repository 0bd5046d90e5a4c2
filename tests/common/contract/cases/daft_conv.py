"""DAFT-conv: options that only matter together."""

VARIANTS = {
    "ungated, local": {"query": False, "local_only": True},
    "local, free filters": {"local_only": True, "reparameterize": False},
    "selection, ungated": {"gumbel_temperature": 0.5, "query": False},
    "selection, free filters": {"gumbel_temperature": 0.5, "reparameterize": False},
}
