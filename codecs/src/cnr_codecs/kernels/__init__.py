"""Compiled loops over rows. They check no bounds: their callers prove every size first.

Serial, without the GIL, and without allocation per row. `cnr_codecs.uniform.reference` says the same in readable
numpy; the two agree bit for bit, so nothing here may be compiled with relaxed floating-point rules.
"""
