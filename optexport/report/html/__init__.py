"""``report.html``: what a bundle says of itself, as one page for people; and two bundles side by side.

Made from the bundle's folder alone, so that a bundle can be given a report later. Needs neither torch nor mlflow.
"""
