"""For authors of plug-ins: conformance suites to inherit, and wrappers that inject faults."""
