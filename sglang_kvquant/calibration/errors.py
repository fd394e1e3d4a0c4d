"""The one error that calibration shows to users."""


class CalibrationError(ValueError):
    """Bad input of a calibration: one sentence that says what, why, and what to do."""
