"""Block traces replayed without a model: what would a pool of a given size have reused?"""

from kvos.simulate.report import Report, Row, simulate
from kvos.simulate.trace import Trace, read_trace

__all__ = ["Report", "Row", "Trace", "read_trace", "simulate"]
