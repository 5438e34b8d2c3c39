"""Renders ``report.html`` of a bundle, and the comparison page of two bundles.

Reads only the bundle's folder, so that older bundles can get a new report. Imports neither torch nor mlflow.
"""
