"""What would this model do on that accelerator? Answers without the accelerator.

The real step programs are compiled by the real compilers (libtpu, XLA:GPU) for devices that are not there; what the
compilers say about memory, copies and collectives, and arithmetic on the vendors' figures, make the report.

    chips      the vendors' figures
    topology   "v6e:2x4" -> compile-only devices and a mesh
    known      geometries of well-known models
    geometry   bytes and FLOPs that a model needs, by arithmetic
    compiled   shapes -> compiled decode, mixed and prefill programs
    hlo        reads the compiled programs' text
    traffic    counts the bytes that a compiled program moves
    checks     what a good step program looks like
    report     memory budget, rooflines, advice
    text, plot the report for people
"""
