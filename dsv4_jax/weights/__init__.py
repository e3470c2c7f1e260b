# SPDX-License-Identifier: Apache-2.0
"""What leaves and enters the framework: weights under the official names."""
