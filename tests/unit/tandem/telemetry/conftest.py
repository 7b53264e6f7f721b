from __future__ import annotations

import pytest

from tests.recorded_spans import RecordedSpans


@pytest.fixture
def recorded() -> RecordedSpans:
    return RecordedSpans()
