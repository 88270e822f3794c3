"""``python -m tests.ascend``: the tools that the checks find, and what is missing."""

from tests.ascend.tools import every_tool

for tool in every_tool():
    print(f"  {tool.name}: {tool.missing or 'found'}")
