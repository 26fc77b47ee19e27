"""Block traces replayed without a model: what would a pool of a given size have reused?"""

from kvos.simulate.report import POLICIES, Report, Row, simulate
from kvos.simulate.trace import Trace, read_trace

__all__ = ["POLICIES", "Report", "Row", "Trace", "read_trace", "simulate"]
