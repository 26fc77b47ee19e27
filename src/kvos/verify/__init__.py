"""Promise 1 as a command: random histories on a runtime against the same token ids without any cache."""

from kvos.verify.report import Mismatch, VerifyReport, render_report
from kvos.verify.run import DEFAULT_ROUNDS, run_verify

__all__ = ["DEFAULT_ROUNDS", "Mismatch", "VerifyReport", "render_report", "run_verify"]
