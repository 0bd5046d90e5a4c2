"""The parts of the benchmark that know no operation or model: comparing, timing, memory, records, tables, pictures.

``cases`` and ``targets`` import these modules, never the other way round.
"""
