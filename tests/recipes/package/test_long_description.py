"""The description on package indices: no link that works only in the repository."""

from recipes.package.long_description import portable

PAGE = """# Title

![A picture](docs/picture.png)

See [the
plugin](plugin/README.md#use), [below](#below) and [a paper](https://example.org/paper).

```python
x = names[0](first)
```
"""


def test_without_an_address_links_become_text_and_pictures_are_left_out():
    assert portable(PAGE, None) == (
        "# Title\n\nSee the\nplugin, below and [a paper](https://example.org/paper).\n\n"
        "```python\nx = names[0](first)\n```\n"
    )


def test_with_an_address_links_and_pictures_are_absolute():
    """A second pass changes nothing, because setuptools may make the metadata twice."""
    site = "https://example.org/project"
    absolute = portable(PAGE, f"{site}/")
    assert f"![A picture]({site}/raw/HEAD/docs/picture.png)" in absolute
    assert f"[the\nplugin]({site}/blob/HEAD/plugin/README.md#use)" in absolute
    assert f"[below]({site}/blob/HEAD/README.md#below)" in absolute
    assert "[a paper](https://example.org/paper)" in absolute and "names[0](first)" in absolute
    assert portable(absolute, site) == absolute
