"""Every table and figure of the three papers: what they print, and what trains each row here."""
