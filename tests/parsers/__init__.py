"""A conformance suite of tool and reasoning parsers, which other parsers can be run with, too."""
