"""Compiled loops over rows. They check no bounds: their callers validate every size first.

The loops are serial, run without the GIL, and allocate nothing per row. The references in
`tests/test_codecs/references` compute the same in readable numpy. The two agree bit for bit, so nothing here may be
compiled with relaxed floating-point rules.
"""
