"""Which version of ripresa is this? The package's own, the same with and without installation."""

VERSION = "0.1.0"
