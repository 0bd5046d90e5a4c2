"""The mechanisms of CONTRIBUTING's guide, as a stranger would write them: in a file each, in place of four."""
