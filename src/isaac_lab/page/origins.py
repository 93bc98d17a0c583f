"""Where the numbers of a reproduction come from."""

from isaac_lab.page.parts import Source
from isaac_lab.studies.paper.folder import View

__all__ = ["of_view"]


def of_view(view: View, directory: str) -> Source:
    """The folders of records that a view is made from, with the calls that wrote the panels in it."""
    homes = dict.fromkeys(outcome.panel.home for outcome in view.outcomes)
    calls = [
        call
        for outcome in view.outcomes
        for call in view.about[outcome.panel.home].get("calls", ())
        if call.get("panel", outcome.panel.name) == outcome.panel.name
    ]
    return Source.of((f"{directory}/{home}/{view.scale.name}" for home in homes), calls)
