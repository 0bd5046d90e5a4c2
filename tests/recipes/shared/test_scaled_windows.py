"""Windows and chunks of short sequences."""

import pytest

from recipes.shared.scaled_windows import scaled_window_arguments


@pytest.mark.parametrize(
    ("name", "length", "arguments"),
    [
        ("local", 256, ["--local-window", 64]),
        ("sparse", 256, ["--sparse-stride", 16, "--sparse-columns", 4]),
        ("bigbird", 2000, ["--bigbird-chunk-size", 62]),
        ("bigbird", 4000, ["--bigbird-chunk-size", 64]),  # the default
        ("bigbird", 9, ["--bigbird-chunk-size", 1]),
        ("flow", 256, []),
        ("flowformer", 256, []),
    ],
)
def test_about_a_quarter_or_the_default(name, length, arguments):
    assert scaled_window_arguments(name, length) == arguments
